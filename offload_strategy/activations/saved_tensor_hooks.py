"""Saved-tensor hooks: pack offloads the bytes of a tensor, unpack rebuilds it from them.

The tensor cache of SSDTrain (section 3) as two functions for
`torch.autograd.graph.saved_tensors_hooks`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy.activations import foreign_hooks as other_hooks
from offload_strategy.activations.batcher import OffloadBatcher, batch_bytes
from offload_strategy.activations.budgets import AutomaticBudget, Budget, FixedBudget
from offload_strategy.activations.conflicting_offloads import refuse_hooks_that_offload
from offload_strategy.activations.device_times import is_timed
from offload_strategy.activations.eligibility import StayCounts, is_small, why_it_stays
from offload_strategy.activations.forward_records import ForwardRecord, SavedItem
from offload_strategy.activations.packed_tensors import KeptTensor, OffloadedTensor
from offload_strategy.activations.pass_profile import profile_of
from offload_strategy.activations.planned_budget import MemoryLimit, PlannedBudget
from offload_strategy.activations.prefetch import Prefetcher
from offload_strategy.activations.recomputed_blocks import RecomputableBlocks
from offload_strategy.activations.saved_tensor_names import SavedTensorNames
from offload_strategy.activations.saved_views import ByteRange, reach, reach_of_base
from offload_strategy.activations.tier_load import TierLoad
from offload_strategy.activations.use_order import Trace
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.torch_support.accelerator import is_asynchronous
from offload_strategy.torch_support.interrupts import UninterruptedSection

_CLIENT = "activations"
#: A view of less than this share of its base is offloaded alone; otherwise the base is.
_WHOLE_BASE_SHARE = 0.5


class Packed(Protocol):
    """The object that autograd holds in place of a saved tensor."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""


class _Open(threading.local):
    """The current forward pass of a thread, and the hint at its start."""

    record: ForwardRecord | None = None
    latest: ForwardRecord | None = None
    hint: int = 0


class ActivationOffload:
    """Offloads what autograd saves inside `forward()`.

    Args:
        store: takes the bytes.
        tiers: where they may go, in order.
        is_weight: tells whether a tensor shares its storage with a parameter or buffer; those stay.
        before_forward: called at the start of each forward pass.
        min_size: bytes below which a saved tensor stays.
        budget: bytes (int) or share (float, 0 to 1) that may leave per forward; None for all, and
            "auto" for as much as can be hidden (SSDTrain, section 3.1).
        prefetch_bytes: how far ahead of the backward pass to load; None to load by time.
        most_backlog: bytes that may wait to be written at most.
        plan_within: a limit of memory by which a plan decides what leaves, instead of a budget.
        recompute: which blocks of a model may run twice, see `RecomputableBlocks`.
        save_weight: what autograd shall hold in place of a streamed weight; None of others. May
            be set later, before the first forward pass.
    """

    def __init__(
        self,
        store: TensorStore,
        tiers: Sequence[Tier],
        is_weight: Callable[[torch.Tensor], bool],
        *,
        before_forward: Callable[[], None],
        min_size: int,
        budget: int | float | Literal["auto"] | None = "auto",
        prefetch_bytes: int | None = None,
        most_backlog: int,
        plan_within: MemoryLimit | None = None,
        recompute: Literal["auto"] | bool = False,
        save_weight: Callable[[torch.Tensor], Packed | None] | None = None,
    ) -> None:
        self._store = store
        self._tiers = list(tiers)
        self._is_weight = is_weight
        self._before_forward = before_forward
        self._min_size = min_size
        self.save_weight = save_weight
        self._tier_load = TierLoad(store, tiers, _CLIENT)
        self._batcher = OffloadBatcher(self._give)
        self.names = SavedTensorNames()
        self._open = _Open()
        self.blocks = RecomputableBlocks(recompute, self._trace)
        self._budget: Budget
        if plan_within is not None:
            self._budget = PlannedBudget(
                self._tier_load, plan_within, self._batcher, self.names, self.blocks
            )
        elif budget == "auto":
            self._budget = AutomaticBudget(self._tier_load, most_backlog)
        else:
            self._budget = FixedBudget(budget)
        self._prefetcher = Prefetcher(store, self._budget, prefetch_bytes)
        if isinstance(self._budget, PlannedBudget):
            self._budget.others_bytes = self._prefetcher.others_bytes
        # What `_batch_bytes` found, and for which pass.
        self._batch: tuple[Trace, int] | None = None
        self._hint = 0
        self._serials = itertools.count()
        self._saved = itertools.count()
        self.enabled = True
        #: What stays for want of knowing how to move it.
        self.stays = StayCounts()
        #: Bytes that could have left and were kept, over all forward passes.
        self.kept_bytes = 0

    def figures(self) -> dict[str, float]:
        """Return current counts and bytes for metrics."""
        latest = self._prefetcher.latest_trace
        planned = {} if self.planned is None else self.planned.figures()
        return planned | {
            "missed_loads": float(self._prefetcher.missed_loads),
            "late_loads": float(self._prefetcher.late_loads),
            "kept_bytes": float(self.kept_bytes),
            "unsupported_bytes": float(sum(self.stays.nbytes.values())),
            "step_saved_bytes": float(latest.saved_bytes) if latest else 0.0,
            "step_left_bytes": float(latest.left_bytes) if latest else 0.0,
        }

    def latest_pass_started_at(self) -> float | None:
        """Return the start of the pass of the last backward (`time.perf_counter`), or None."""
        latest = self._prefetcher.latest_trace
        return None if latest is None else latest.started_at

    def profile(self, busy: Sequence[tuple[float, float]] = ()) -> Profile | None:
        """Return the profile of the last pass, once its backward has ended.

        Args:
            busy: Spans in which something else ran on its thread (`time.perf_counter`).
        """
        latest = self._prefetcher.latest_trace
        if latest is None:
            return None
        planned = self.planned
        baseline = None if planned is None else planned.baseline
        held = None if planned is None else planned.held_until
        end = self._prefetcher.ended_at(latest)
        return profile_of(
            latest,
            self._tier_load,
            self.names,
            busy=busy,
            baseline=baseline,
            held_until=held,
            ended_at=end,
            blocks=self.blocks,
            io_overhead=None if planned is None else planned.io_overhead,
        )

    @property
    def planned(self) -> PlannedBudget | None:
        """The budget, if it goes by a plan."""
        return self._budget if isinstance(self._budget, PlannedBudget) else None

    # ------------------------------------------------------------------ forward passes
    def hint(self) -> None:
        """Start a micro-batch: forward passes until the next hint belong together."""
        self._hint += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Offload tensors that are saved in this context; nested contexts change nothing."""
        hooks = self.enter()
        try:
            yield
        finally:
            self.leave(hooks)

    def enter(self) -> saved_tensors_hooks | None:
        """Start a forward pass on this thread; return None if one is already running."""
        if not self.enabled or self._open.record is not None or not other_hooks.may_open():
            return None
        outer = other_hooks.foreign(ActivationOffload)
        if self._min_size < sys.maxsize:
            refuse_hooks_that_offload(outer)
        self._before_forward()
        self.blocks.forward_begins()
        if self.planned is None:
            self._store.pass_begins()
        else:  # memory is at its peak when forward ends; backward needs the buffers
            self._store.trim()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        # Ctrl-C between entering the hooks and recording it would leave them active for ever.
        with UninterruptedSection():
            hooks.__enter__()
            if outer is not None:
                other_hooks.go_through(outer)
            self._open.record = self._record()
        return hooks

    def leave(self, hooks: saved_tensors_hooks | None) -> None:
        """End what `enter` started."""
        if hooks is not None:
            record = self._open.record
            with UninterruptedSection():
                hooks.__exit__(None, None, None)
                self._open.record = None
            if sys.exc_info()[0] is None and self.enabled and record is not None:
                with self._held(record.trace):
                    self._batcher.flush()
            else:
                self._batcher.discard()

    @contextmanager
    def saving_weights(self) -> Iterator[bool]:
        """Save streamed weights by reference in this context; nothing else is offloaded.

        Yields:
            Whether our hooks are active; False if no hooks are allowed.
        """
        if not other_hooks.may_open():
            yield False
            return
        if other_hooks.belong_to(self):
            yield True
            return
        outer = other_hooks.foreign(ActivationOffload)
        hooks = saved_tensors_hooks(self._pack_weight, self._unpack)
        with UninterruptedSection():
            hooks.__enter__()
            if outer is not None:
                other_hooks.go_through(outer)
            opened = other_hooks.innermost()
        try:
            yield True
        finally:
            # If Ctrl-C ended a backward pass, torch has removed all hooks that were entered in it.
            if other_hooks.innermost() == opened:
                hooks.__exit__(None, None, None)

    def _pack_weight(self, tensor: torch.Tensor) -> Packed:
        weight = None if self.save_weight is None else self.save_weight(tensor)
        return KeptTensor(tensor) if weight is None else weight

    @contextmanager
    def _held(self, trace: Trace) -> Iterator[None]:
        """Add the time that forward waits for the tiers in this context to its trace."""
        before = self._tier_load.stalled_seconds()
        yield
        trace.held += self._tier_load.stalled_seconds() - before

    def _trace(self) -> Trace | None:
        record = self._open.record
        return None if record is None else record.trace

    def _record(self) -> ForwardRecord:
        """Return the record of the new forward pass, or of its micro-batch if there is a hint."""
        opened = self._open
        latest = opened.latest
        same = self._hint > 0 and opened.hint == self._hint
        if same and latest is not None and not latest.in_backward:
            return latest
        record = ForwardRecord(next(self._serials), self._store, self._prefetcher)
        self._prefetcher.add(record)
        opened.latest = record if self._hint else None
        opened.hint = self._hint
        return record

    # ------------------------------------------------------------------ hooks
    def _pack(self, tensor: torch.Tensor) -> Packed:
        if self.save_weight is not None:
            weight = self.save_weight(tensor)
            if weight is not None:
                return weight
        record = self._open.record
        # Inside backward (a checkpointed region is recomputed) the tensor is needed at once.
        inside_backward = torch._C._current_graph_task_id() != -1
        if record is None or not self.enabled or inside_backward:
            return KeptTensor(tensor)
        if is_small(tensor, self._min_size):
            return KeptTensor(tensor)
        reason = why_it_stays(tensor, self._is_weight)
        if reason is not None:
            self.stays.note(reason, tensor, self._min_size)
            return KeptTensor(tensor)
        wanted = reach(tensor)
        item = record.find(tensor, wanted)
        if item is not None:
            if not item.leaves:
                return KeptTensor(tensor, item, record)
            return OffloadedTensor(tensor, item.range, record).attach(item)
        # Views of one activation (query, key, value) overlap: the whole is offloaded once. A small
        # view of a large tensor (a batch of a data set) must not offload all of it.
        span = reach_of_base(tensor, wanted)
        if not span.covers(wanted) or wanted.nbytes < _WHOLE_BASE_SHARE * span.nbytes:
            span = wanted
        if span.nbytes < self._min_size:
            return KeptTensor(tensor)
        return self._new_item(tensor, span, record)

    def _new_item(
        self, tensor: torch.Tensor, span: ByteRange, record: ForwardRecord
    ) -> KeptTensor | OffloadedTensor:
        trace = record.trace
        trace.saved_bytes += span.nbytes
        prefix = trace.prefix_with(tensor)
        if tensor.device.type != "cpu" and not trace.sizes and is_asynchronous(tensor.device):
            trace.computed_by(tensor.device, timed=is_timed(record.serial))
            self._tier_load.on_device = True
        idle, saved_after = self._prefetcher.times(prefix)
        item = record.add(tensor, span, prefix)
        self.names.note(prefix, tensor)
        if not self._budget.admits(span.nbytes, trace, idle, saved_after):
            self.kept_bytes += span.nbytes
            return KeptTensor(tensor, item, record)
        handle = OffloadedTensor(tensor, span, record).attach(item)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), span.start, (span.nbytes,), (1,))
        item.payload = flat
        trace.left_bytes += span.nbytes
        latest = self._prefetcher.latest_trace
        together = 0
        if latest is not None and tensor.device.type == "cpu":
            together = self._batch_bytes(latest)
        # Backward starts with what was saved last: that stays if host memory is scarce.
        # This call comes last: see [Note: the interpreter lock].
        with self._held(trace):
            self._batcher.add(item, -next(self._saved), together)
        return handle

    def _batch_bytes(self, latest: Trace) -> int:
        """Return the size of a batch; computed once per pass, because this runs for every item."""
        known = self._batch
        if known is None or known[0] is not latest:
            known = (latest, batch_bytes(latest.saved_bytes, self._tier_load.rate(write=True)))
            self._batch = known
        return known[1]

    def _give(self, item: SavedItem, next_use: int) -> None:
        payload = item.payload
        assert payload is not None
        item.ticket = self._store.put(
            payload,
            _CLIENT,
            self._tiers,
            next_use=next_use,
            whole_pages=True,
            one_block_at_a_time=payload.device.type == "cpu",
        )
        item.storage.entry = item.ticket.entry
        item.payload = None

    def _unpack(self, packed: Packed) -> torch.Tensor:
        return packed.unpack()
