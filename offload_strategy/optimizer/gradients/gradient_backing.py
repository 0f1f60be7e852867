"""The values of an `OffloadedGradient` and its aliases: where they are, edits, cached norms.

[Note: recorded or materialized]
A backing is in one of two states:

    recorded      the source has the values. In-place edits are recorded; reading loads a copy,
                  applies the edits to it and drops it.
    materialized  the source is a plain tensor that has the values, recorded edits included, because
                  somebody has an alias of its memory or has changed it otherwise than by a
                  recordable edit. Everything happens to this tensor from now on.

A materialized backing stays so: nobody knows when the last alias is gone.

[Note: no locks]
A gradient is used by one thread at a time, as a plain one; its last owner may die on any thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.recorded_edits import Edit, EditHistory
from offload_strategy.optimizer.states.subgroups import lay_out
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.torch_support.accelerator import is_asynchronous
from offload_strategy.torch_support.keyboard_interrupts import default_modes


class TensorMetadata(NamedTuple):
    """Everything about a strided tensor except its values."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMetadata:
        """Return the metadata of a tensor."""
        strides, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(tensor.shape, strides, offset, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Allocate a tensor of this shape, strides and dtype."""
        with default_modes():
            return torch.empty_strided(
                self.shape, self.strides, dtype=self.dtype, device=device or self.device
            )


class StoredGradient:
    """A gradient in the store; its ticket is freed when the last owner of this is gone.

    It must not change any more, and have no gaps between its elements.
    """

    def __init__(self, store: TensorStore, gradient: torch.Tensor, tiers: Sequence[Tier]) -> None:
        flat = in_memory_order(gradient).view(-1).view(torch.uint8)
        self._store = store
        self._segment = lay_out([gradient])[0]
        self._ticket = store.put(flat, "optimizer", tiers)

    def load(self) -> torch.Tensor:
        """A copy in a buffer of the store's."""
        return self._segment.view(self._store.private(self._ticket))


@dataclass(frozen=True)
class ConsumedGradient:
    """A gradient that an update has used up; `parameter` is what the error calls its parameter.

    Of one that data-parallel ranks compare at `step()` there is a copy.
    """

    parameter: str
    copy: torch.Tensor | None = None

    def load(self) -> torch.Tensor:
        """Raise `OffloadError`."""
        raise OffloadError(
            f"the gradient of {self.parameter} is gone: with `optimizer.overlap: eager` the "
            f"update has used it during backward, so it can neither be read, scaled or clipped, "
            f"nor accumulated into by another backward before step(). Set `optimizer.overlap: "
            f"commit`, which keeps gradients until step()."
        )


#: Where the values are; a tensor shares its memory with the gradient, None stands for zeros.
GradientSource = torch.Tensor | StoredGradient | ConsumedGradient | None


def norm_of(values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Compute the norm of one gradient with the kernel of `torch.nn.utils.clip_grad_norm_`."""
    with torch.no_grad():
        return torch._foreach_norm([values], order)[0]


def has_overflow(tensor: torch.Tensor) -> bool:
    """Whether any value is infinite or NaN, in one pass without masks (MemAscend).

    `torch.aminmax` propagates NaN, and infinities are the extremes, so both extremes are finite
    exactly when every value is.
    """
    return tensor.numel() > 0 and not bool(
        torch.stack(torch.aminmax(in_memory_order(tensor))).isfinite().all()
    )


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its dimensions in the order in which its elements lie in memory."""
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


class GradientBacking:
    """The values of one gradient, shared by all `OffloadedGradient`s that are aliases."""

    def __init__(self, source: GradientSource, like: torch.Tensor) -> None:
        self.metadata = TensorMetadata.of(like)
        if isinstance(source, torch.Tensor):
            source = source.detach()
        else:
            self.metadata = self.metadata._replace(offset=0)
        self._source = source
        self.is_materialized = False
        #: The recorded edits; empty once materialized.
        self.history = EditHistory()
        #: How many of the edits were applied to the memory that the source shares.
        self._applied = 0
        # The latest norm of each order, and the edits after which it was taken; for as long as
        # the values are not `edited`.
        self._norms: dict[float, tuple[EditHistory, torch.Tensor]] = {}
        #: Orders of the norms that were requested of the gradient as backward left it.
        self.requested_norms: set[float] = set()
        self._edited = False
        self._version = self._source_version()

    @property
    def is_consumed(self) -> bool:
        """Whether an update has used up the values."""
        return isinstance(self._source, ConsumedGradient)

    def compared_values(self) -> torch.Tensor | None:
        """Return a copy of the values, unless they were used up and none was kept."""
        source = self._source
        return source.copy if isinstance(source, ConsumedGradient) else self.read()

    @property
    def edited(self) -> bool:
        """Whether the values may differ from the source's original values after `history`.

        They were changed otherwise than by recorded edits, or somebody has an alias of their memory
        and may change them at any time.
        """
        return self._edited or self._version != self._source_version()

    # ------------------------------------------------------------------ values
    def raw(self) -> torch.Tensor:
        """The values before the recorded edits, not to be changed, on the gradient's device."""
        assert not self._applied, "the edits were applied to the gradient itself"
        return self._load()[0]

    def values(self) -> torch.Tensor:
        """The values as a plain tensor on the gradient's device, for an update at `step()`.

        If the source shares its memory, that is what is returned, and the edits are applied to it,
        once; `history` goes on to name them, so that they can still be compared. Else it is a copy.
        """
        self._edited = self.edited  # before the version changes
        data, shared = self._load()
        self._pending().apply_(data)
        if shared:
            self._applied = len(self.history.edits)
            self._version = self._source_version()  # this change is our own
        return data

    def read(self) -> torch.Tensor:
        """The values for a caller who neither changes nor keeps them; the state stays."""
        data, shared = self._load()
        if pending := self._pending():
            data = pending.apply_(data.clone() if shared else data)
        return data

    def materialize(self) -> torch.Tensor:
        """The plain tensor that has the values from now on; see the note."""
        if not self.is_materialized:
            values = self.values()
            shared = isinstance(self._source, torch.Tensor)
            if not shared and values.untyped_storage().nbytes() != values.nbytes:
                # A part of a staging buffer: its storage is nothing that a user should see.
                values = self.metadata.empty().copy_(values)
            self.replace(values)
        return cast(torch.Tensor, self._source)

    def zero_(self) -> None:
        """Make all values zero, without loading them."""
        if self.is_materialized:
            self.materialize().zero_()
        else:
            self._reset(None)

    def replace(self, values: torch.Tensor) -> None:
        """Materialize with other values: a plain tensor of the same metadata."""
        self.is_materialized = True
        self._reset(values)

    def _reset(self, source: torch.Tensor | None) -> None:
        self._source = source
        self._edited = True
        self.history = EditHistory()
        self._applied = 0

    def _pending(self) -> EditHistory:
        return EditHistory(self.history.edits[self._applied :])

    def _load(self) -> tuple[torch.Tensor, bool]:
        """The source's values on the gradient's device, and whether it shares them."""
        source = self._source
        if isinstance(source, torch.Tensor):
            return source, True
        with default_modes():
            if source is None:
                return self.metadata.empty().zero_(), False
            return source.load().to(self.metadata.device), False

    def _source_version(self) -> int:
        # Somebody may have kept the tensor that backward made, and change it.
        if not isinstance(self._source, torch.Tensor) or self._source.is_inference():
            return 0
        return self._source._version

    def relocate(self, put: Callable[[torch.Tensor], GradientSource]) -> None:
        """Have `put` move the values, if they are unedited and nobody else has their memory."""
        if self._is_whole and self.is_alone and not self.edited and not self._applied:
            self._source = put(cast(torch.Tensor, self._source))
            self._version = self._source_version()

    def materialize_if_held(self) -> None:
        """Materialize if somebody keeps backward's tensor, and this is not a part of a bucket."""
        if self._is_whole and not self.is_alone:
            self.materialize()

    @property
    def _is_whole(self) -> bool:
        """Whether the source is backward's tensor, and all of its storage."""
        data = self._source
        return isinstance(data, torch.Tensor) and data.untyped_storage().nbytes() == data.nbytes

    @property
    def is_alone(self) -> bool:
        """Whether nobody else has the memory, who could change it without anyone noticing."""
        if not isinstance(self._source, torch.Tensor):
            return True
        storage = self._source.untyped_storage()
        # The two that may be there: the tensor that the source has, and `storage`.
        return torch._C._storage_Use_Count(storage._cdata) <= 2

    # ------------------------------------------------------------------ edits and norms
    def record(self, edit: Edit) -> None:
        """Record an edit of all values."""
        assert not self.is_materialized
        if isinstance(self._source, ConsumedGradient):
            self._source.load()
        self.history = EditHistory((*self.history.edits, edit))

    def cache_norm(self, order: float, norm: torch.Tensor) -> None:
        """Provide the norm of the values as they are now, so that a request does not load them."""
        self._norms[float(order)] = self.history, norm.detach().clone()

    def norm(self, order: float) -> torch.Tensor:
        """The norm as `norm_of` computes it; values are loaded only if it is not cached."""
        if self.edited:
            return norm_of(self.read(), order)
        order = float(order)
        if not self.history:
            self.requested_norms.add(order)
        if order not in self._norms or self._norms[order][0] != self.history:
            self.cache_norm(order, norm_of(self.read(), order))
        return self._norms[order][1].to(self.metadata.device, copy=True)

    def overflows(self) -> torch.Tensor:
        """Whether any value is infinite or NaN, as a tensor on the gradient's device.

        The norm of order infinity, which is finite exactly when all values are, can be cached, and
        an accelerator need not be awaited for it. On the CPU it takes much longer than a look.
        """
        device = self.metadata.device
        if is_asynchronous(device) and self.metadata.shape.numel():
            return ~self.norm(math.inf).isfinite()
        return torch.tensor(has_overflow(self.read()), device=device)
