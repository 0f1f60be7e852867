"""What autograd holds in place of a saved tensor, until backward asks for it."""

from __future__ import annotations

import torch

from offload_strategy.activations.forward_records import ForwardRecord, Slot
from offload_strategy.activations.saved_views import (
    ByteRange,
    SavedView,
    VersionProbe,
    raise_if_changed,
)


class Kept:
    """A saved tensor that stays in memory.

    Args:
        tensor: what was saved.
        slot: of its bytes, if they could have left: what backward does with them is learned from.
        record: of the forward pass that the slot belongs to.
    """

    __slots__ = ("__weakref__", "record", "slot", "tensor", "unpacked", "version")

    def __init__(
        self, tensor: torch.Tensor, slot: Slot | None = None, record: ForwardRecord | None = None
    ) -> None:
        # Detached: a node that saves its own output would otherwise own itself for ever.
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version
        self.slot = slot
        self.record = record
        self.unpacked = False
        if slot is not None:
            slot.add_view(self)

    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since, as autograd says it.
        """
        if self.version >= 0:
            raise_if_changed(self.tensor, self.version)
        if self.slot is not None and self.record is not None:
            self.unpacked = True
            self.record.used(self.slot)
        return self.tensor


class Moved:
    """A saved tensor whose bytes are given to the store.

    [Note: the interpreter lock]
    Where a call into torch lets go of the interpreter lock, I/O threads that were just woken take
    it, and training waits for them. So what needs torch comes before what wakes threads: the store
    is given the bytes, or told to fetch others, last of all, and the threads begin when the
    operation that training is about to run lets them.

    Args:
        tensor: what was saved; it is not held.
        span: the bytes of its storage that leave.
        record: of the forward pass.
    """

    __slots__ = ("__weakref__", "probe", "record", "slot", "unpacked", "view")

    slot: Slot

    def __init__(self, tensor: torch.Tensor, span: ByteRange, record: ForwardRecord) -> None:
        self.record = record
        self.view = SavedView(tensor, span)
        self.probe = VersionProbe(tensor)
        self.unpacked = False

    def stands_for(self, slot: Slot) -> Moved:
        """Say where the bytes are."""
        self.slot = slot
        slot.add_view(self)
        return self

    def unpack(self) -> torch.Tensor:
        """The tensor, rebuilt on the bytes.

        Raises:
            RuntimeError: it was changed in place since, as autograd says it.
            StorageError: the bytes could not be read.
        """
        self.probe.check()
        self.unpacked = True
        tensor = self.view.rebuild(self.record.bytes_of(self.slot))
        self.record.used(self.slot)
        return tensor
