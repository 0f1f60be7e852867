"""Saved-tensor hooks: pack gives the bytes to the heap, unpack rebuilds the tensor from them.

The tensor cache of SSDTrain (section 3), as two functions around
`torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy.activations.identity import (
    ByteRange,
    VersionProbe,
    raise_if_changed,
    reach,
    reach_of_base,
)
from offload_strategy.activations.policy import can_leave, within_budget
from offload_strategy.activations.records import ForwardRecord, Slot
from offload_strategy.heap import Heap, Tier
from offload_strategy.units import MiB

#: Distance of prefetching when `activations.prefetch` is auto: enough to keep a disk busy.
DEFAULT_PREFETCH_BYTES = 64 * MiB
#: A view that reaches less than this share of its base takes only its own bytes along.
_WHOLE_BASE_SHARE = 0.5


class _Kept:
    """A saved tensor that stays in memory."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own output would otherwise own itself for ever.
        self.tensor = tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        if self.version >= 0:
            what = f"[{self.tensor.type()} {list(self.tensor.shape)}]"
            raise_if_changed(self.tensor, self.version, what)
        return self.tensor


class _Moved:
    """A saved tensor whose bytes were given to the heap."""

    __slots__ = (
        "__weakref__",
        "dtype",
        "offset_bytes",
        "probe",
        "record",
        "shape",
        "slot",
        "strides",
        "unpacked",
    )

    def __init__(self, tensor: torch.Tensor, slot: Slot, record: ForwardRecord) -> None:
        self.slot = slot
        self.record = record
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.dtype = tensor.dtype
        self.offset_bytes = reach(tensor).start - slot.range.start
        self.probe = VersionProbe(tensor)
        self.unpacked = False
        slot.add_view(self)

    def unpack(self, heap: Heap) -> torch.Tensor:
        self.probe.check()
        self.unpacked = True
        loaded = self.slot.bytes(heap)
        self.record.fetch_ahead(self.slot)
        start = (loaded.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=loaded.device).set_(
            loaded.untyped_storage(), start, self.shape, self.strides
        )


class ActivationOffload:
    """Offloads what autograd saves inside `forward()`.

    Args:
        heap: takes the bytes.
        tiers: where they may go, in order.
        is_weight: tells whether a tensor shares its storage with a parameter or buffer; those stay.
        before_forward: called at the start of each forward pass.
        min_size: bytes below which a saved tensor stays.
        budget: bytes (int) or share (float, 0 to 1) that may leave per forward; None for all.
        prefetch_bytes: how far ahead of the backward pass to load; None for a fixed default.
    """

    def __init__(
        self,
        heap: Heap,
        tiers: Sequence[Tier],
        is_weight: Callable[[torch.Tensor], bool],
        *,
        before_forward: Callable[[], None],
        min_size: int,
        budget: int | float | None = None,
        prefetch_bytes: int | None = None,
    ) -> None:
        self._heap = heap
        self._tiers = list(tiers)
        self._is_weight = is_weight
        self._before_forward = before_forward
        self._min_size = min_size
        self._budget = budget
        self._prefetch_bytes = DEFAULT_PREFETCH_BYTES if prefetch_bytes is None else prefetch_bytes
        self._local = threading.local()
        self._saved = itertools.count()
        self.enabled = True

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload what is saved inside; entering again inside changes nothing."""
        hooks = self.enter()
        try:
            yield
        finally:
            self.leave(hooks)

    def enter(self) -> saved_tensors_hooks | None:
        """Begin a forward pass on this thread; None if one is already under way."""
        if not self.enabled or getattr(self._local, "record", None) is not None:
            return None
        self._before_forward()
        self._local.record = ForwardRecord(self._heap, self._prefetch_bytes)
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        return hooks

    def leave(self, hooks: saved_tensors_hooks | None) -> None:
        """End what `enter` began."""
        if hooks is not None:
            hooks.__exit__(None, None, None)
            self._local.record = None

    def _pack(self, tensor: torch.Tensor) -> _Kept | _Moved:
        record: ForwardRecord | None = getattr(self._local, "record", None)
        # Inside backward (a checkpointed region is recomputed) the tensor is needed at once.
        inside_backward = torch._C._current_graph_task_id() != -1
        if record is None or not self.enabled or inside_backward:
            return _Kept(tensor)
        if not can_leave(tensor, self._is_weight):
            return _Kept(tensor)
        wanted = reach(tensor)
        slot = record.find(tensor, wanted)
        if slot is None:
            slot = self._give_away(tensor, wanted, record)
        return _Kept(tensor) if slot is None else _Moved(tensor, slot, record)

    def _give_away(
        self, tensor: torch.Tensor, wanted: ByteRange, record: ForwardRecord
    ) -> Slot | None:
        # Views of one activation (query, key, value) overlap: it leaves once, whole. A small view
        # of something large (a batch out of a data set) must not drag all of it along.
        span = reach_of_base(tensor)
        if not span.covers(wanted) or wanted.nbytes < _WHOLE_BASE_SHARE * span.nbytes:
            span = wanted
        if span.nbytes < self._min_size:
            return None
        record.packed_bytes += span.nbytes
        if not within_budget(self._budget, record.packed_bytes, record.left_bytes, span.nbytes):
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), span.start, (span.nbytes,), (1,))
        # Backward begins with what was saved last: where host memory is short, that stays.
        ticket = self._heap.put(flat, "activations", self._tiers, next_use=-next(self._saved))
        return record.add(tensor, span, ticket)

    def _unpack(self, packed: _Kept | _Moved) -> torch.Tensor:
        return packed.unpack() if isinstance(packed, _Kept) else packed.unpack(self._heap)
