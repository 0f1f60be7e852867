"""Saved-tensor hooks: pack gives the bytes to the store, unpack rebuilds the tensor from them.

The tensor cache of SSDTrain (section 3), as two functions around
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
from offload_strategy.activations.batcher import Outbox, batch_bytes
from offload_strategy.activations.conflicting_offloads import refuse_hooks_that_offload
from offload_strategy.activations.eligibility import StayCounts, is_small, why_it_stays
from offload_strategy.activations.forward_records import ForwardRecord, Slot
from offload_strategy.activations.offload_budget import AutomaticBudget, Budget, FixedBudget
from offload_strategy.activations.packed_tensors import Kept, Moved
from offload_strategy.activations.pass_profile import profile_of
from offload_strategy.activations.planned_budget import MemoryLimit, PlannedBudget
from offload_strategy.activations.prefetch import Prefetcher
from offload_strategy.activations.recomputed_blocks import RecomputableBlocks
from offload_strategy.activations.saved_views import ByteRange, reach, reach_of_base
from offload_strategy.activations.tensor_names import ItemNames
from offload_strategy.activations.tier_load import TierTraffic
from offload_strategy.activations.use_order import Trace
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection

_CLIENT = "activations"
#: A view that reaches less than this share of its base takes only its own bytes along.
_WHOLE_BASE_SHARE = 0.5


class Packed(Protocol):
    """What autograd holds in place of a saved tensor."""

    def unpack(self) -> torch.Tensor:
        """The tensor."""


class _Open(threading.local):
    """The forward pass under way on a thread, and the hint under which it began."""

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
        self._traffic = TierTraffic(store, tiers, _CLIENT)
        self._outbox = Outbox(self._give)
        self.names = ItemNames()
        self._open = _Open()
        self.blocks = RecomputableBlocks(recompute, self._trace)
        self._budget: Budget
        if plan_within is not None:
            self._budget = PlannedBudget(
                self._traffic, plan_within, self._outbox, self.names, self.blocks
            )
        elif budget == "auto":
            self._budget = AutomaticBudget(self._traffic, most_backlog)
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
        """Figures of this moment, for metrics: counts, and bytes."""
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
        """When the pass began whose backward was seen last (`time.perf_counter`), if one was."""
        latest = self._prefetcher.latest_trace
        return None if latest is None else latest.started_at

    def profile(self, busy: Sequence[tuple[float, float]] = ()) -> Profile | None:
        """What the last pass made and used, once its backward is over.

        Args:
            busy: when something else ran on the thread of the pass; `time.perf_counter`.
        """
        latest = self._prefetcher.latest_trace
        if latest is None:
            return None
        planned = self.planned
        beside = None if planned is None else planned.beside
        held = None if planned is None else planned.held_until
        end = self._prefetcher.ended_at(latest)
        return profile_of(
            latest,
            self._traffic,
            self.names,
            busy=busy,
            beside=beside,
            held_until=held,
            ended_at=end,
            blocks=self.blocks,
            toll=None if planned is None else planned.toll,
        )

    @property
    def planned(self) -> PlannedBudget | None:
        """What decides by a plan, if there is one."""
        return self._budget if isinstance(self._budget, PlannedBudget) else None

    # ------------------------------------------------------------------ forward passes
    def hint(self) -> None:
        """Another micro-batch begins: forward passes until the next hint belong together."""
        self._hint += 1

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
        if not self.enabled or self._open.record is not None or not other_hooks.may_open():
            return None
        outer = other_hooks.foreign(ActivationOffload)
        if self._min_size < sys.maxsize:
            refuse_hooks_that_offload(outer)
        self._before_forward()
        self.blocks.forward_begins()
        if self.planned is None:
            self._store.pass_begins()
        else:  # memory is at its peak where forward ends; buffers are for backward
            self._store.trim()
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        # Ctrl-C between hooks that are in force and the note of it would leave them so for ever.
        with UninterruptedSection():
            hooks.__enter__()
            if outer is not None:
                other_hooks.go_through(outer)
            self._open.record = self._record()
        return hooks

    def leave(self, hooks: saved_tensors_hooks | None) -> None:
        """End what `enter` began."""
        if hooks is not None:
            record = self._open.record
            with UninterruptedSection():
                hooks.__exit__(None, None, None)
                self._open.record = None
            if sys.exc_info()[0] is None and self.enabled and record is not None:
                with self._held(record.trace):
                    self._outbox.empty()
            else:
                self._outbox.forget()

    @contextmanager
    def saving_weights(self) -> Iterator[bool]:
        """Within, streamed weights that are saved are found again; nothing else leaves.

        Yields:
            Whether hooks of ours are in force: False where none may be.
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
            # Where Ctrl-C ended a backward pass, torch has taken off all that was opened within.
            if other_hooks.innermost() == opened:
                hooks.__exit__(None, None, None)

    def _pack_weight(self, tensor: torch.Tensor) -> Packed:
        weight = None if self.save_weight is None else self.save_weight(tensor)
        return Kept(tensor) if weight is None else weight

    @contextmanager
    def _held(self, trace: Trace) -> Iterator[None]:
        """Within, a forward pass may be made to wait."""
        before = self._traffic.stalled_seconds()
        yield
        trace.held += self._traffic.stalled_seconds() - before

    def _trace(self) -> Trace | None:
        record = self._open.record
        return None if record is None else record.trace

    def _record(self) -> ForwardRecord:
        """A record for the forward pass that begins: the micro-batch's, if a hint names one."""
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
            return Kept(tensor)
        if is_small(tensor, self._min_size):
            return Kept(tensor)
        reason = why_it_stays(tensor, self._is_weight)
        if reason is not None:
            self.stays.note(reason, tensor, self._min_size)
            return Kept(tensor)
        wanted = reach(tensor)
        slot = record.find(tensor, wanted)
        if slot is not None:
            if not slot.leaves:
                return Kept(tensor, slot, record)
            return Moved(tensor, slot.range, record).stands_for(slot)
        # Views of one activation (query, key, value) overlap: it leaves once, whole. A small view
        # of something large (a batch out of a data set) must not drag all of it along.
        span = reach_of_base(tensor, wanted)
        if not span.covers(wanted) or wanted.nbytes < _WHOLE_BASE_SHARE * span.nbytes:
            span = wanted
        if span.nbytes < self._min_size:
            return Kept(tensor)
        return self._new_item(tensor, span, record)

    def _new_item(
        self, tensor: torch.Tensor, span: ByteRange, record: ForwardRecord
    ) -> Kept | Moved:
        trace = record.trace
        trace.saved_bytes += span.nbytes
        prefix = trace.prefix_with(tensor)
        idle = self._prefetcher.idle_seconds(prefix)
        slot = record.add(tensor, span, prefix)
        self.names.note(prefix, tensor)
        if not self._budget.admits(span.nbytes, trace, idle):
            self.kept_bytes += span.nbytes
            return Kept(tensor, slot, record)
        handle = Moved(tensor, span, record).stands_for(slot)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), span.start, (span.nbytes,), (1,))
        slot.payload = flat
        trace.left_bytes += span.nbytes
        latest = self._prefetcher.latest_trace
        together = 0
        if latest is not None and tensor.device.type == "cpu":
            together = self._batch_bytes(latest)
        # Backward begins with what was saved last: where host memory is short, that stays.
        # Last of all: see [Note: the interpreter lock].
        with self._held(trace):
            self._outbox.add(slot, -next(self._saved), together)
        return handle

    def _batch_bytes(self, latest: Trace) -> int:
        """How many bytes leave together; once a pass, as this runs for every item."""
        known = self._batch
        if known is None or known[0] is not latest:
            known = (latest, batch_bytes(latest.saved_bytes, self._traffic.rate(write=True)))
            self._batch = known
        return known[1]

    def _give(self, slot: Slot, next_use: int) -> None:
        payload = slot.payload
        assert payload is not None
        slot.ticket = self._store.put(
            payload,
            _CLIENT,
            self._tiers,
            next_use=next_use,
            whole_pages=True,
            one_block_at_a_time=payload.device.type == "cpu",
        )
        slot.storage.entry = slot.ticket.entry
        slot.payload = None

    def _unpack(self, packed: Packed) -> torch.Tensor:
        return packed.unpack()
