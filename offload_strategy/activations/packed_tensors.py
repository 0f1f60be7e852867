"""The objects that autograd holds in place of saved tensors until backward unpacks them."""

from __future__ import annotations

import torch

from offload_strategy.activations.forward_records import ForwardRecord, SavedItem
from offload_strategy.activations.saved_views import (
    ByteRange,
    SavedView,
    VersionProbe,
    raise_if_changed,
)


class KeptTensor:
    """A saved tensor that stays in memory.

    Args:
        tensor: The saved tensor.
        item: The item of its bytes if they could have been offloaded: its use is learned from.
        record: Record of the forward pass of the item.
    """

    __slots__ = ("__weakref__", "item", "record", "tensor", "unpacked", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        item: SavedItem | None = None,
        record: ForwardRecord | None = None,
    ) -> None:
        # Detached: otherwise a node that saves its own output would be part of a reference cycle.
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version
        self.item = item
        self.record = record
        self.unpacked = False
        if item is not None:
            item.add_view(self)

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: If it was changed in place, with autograd's message.
        """
        if self.version >= 0:
            raise_if_changed(self.tensor, self.version)
        if self.item is not None and self.record is not None:
            self.unpacked = True
            self.record.used(self.item)
        return self.tensor


class OffloadedTensor:
    """A saved tensor whose bytes are offloaded.

    [Note: the interpreter lock]
    If a call into torch releases the interpreter lock, I/O threads that were just woken acquire it,
    and training waits for them. So calls into torch come before calls that wake threads: giving
    bytes to the store and prefetching come last, and the threads start during the operation that
    training runs next.

    Args:
        tensor: The saved tensor, which is not kept alive.
        span: Range of bytes of its storage that is offloaded.
        record: Record of the forward pass.
    """

    __slots__ = ("__weakref__", "item", "probe", "record", "unpacked", "view")

    item: SavedItem

    def __init__(self, tensor: torch.Tensor, span: ByteRange, record: ForwardRecord) -> None:
        self.record = record
        self.view = SavedView(tensor, span)
        self.probe = VersionProbe(tensor)
        self.unpacked = False

    def attach(self, item: SavedItem) -> OffloadedTensor:
        """Set the item that has the bytes."""
        self.item = item
        item.add_view(self)
        return self

    def unpack(self) -> torch.Tensor:
        """Return the tensor, rebuilt from its bytes.

        Raises:
            RuntimeError: If it was changed in place, with autograd's message.
            StorageError: If the bytes could not be read.
        """
        self.probe.check()
        self.unpacked = True
        tensor = self.view.rebuild(self.record.bytes_of(self.item))
        self.record.used(self.item)
        return tensor
