"""Saved-tensor hooks: pack offloads the bytes of a tensor, unpack rebuilds it from them.

The tensor cache of SSDTrain (section 3) for `torch.autograd.graph.saved_tensors_hooks`.
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
from offload_strategy.activations.budgets import AutomaticBudget, Budget, FreeMemory, WriteBudget
from offload_strategy.activations.device_times import DeviceTimes
from offload_strategy.activations.eligibility import (
    UnsupportedTensors,
    covers,
    is_small,
    reach,
    reach_of_base,
    why_it_stays,
)
from offload_strategy.activations.forward_records import ForwardRecord, Trace
from offload_strategy.activations.packed_tensors import KeptItem, KeptTensor, OffloadedTensor
from offload_strategy.activations.pass_profile import PassProfiler
from offload_strategy.activations.planned_budget import MemoryLimit, PlannedBudget
from offload_strategy.activations.prefetch import Prefetcher
from offload_strategy.activations.resized_storages import announce_to
from offload_strategy.activations.tier_writes import DEVICE_BATCH_BYTES, TierWrites, batch_bytes
from offload_strategy.errors import OffloadError
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.torch_support.accelerator import is_asynchronous
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection

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
    """Offloads what autograd saves inside `forward()`, except for weights and what is small.

    `budget`: bytes (int) or share (float) that may leave in a pass; None for all, "auto" for what
    can be hidden (SSDTrain, section 3.1); a plan within `memory` decides instead if it `plans`.
    `prefetch_bytes` is how far ahead of backward to load; None to load by time. What is over
    `write_budget` stays, as far as there is memory for it. `verify` compares unpacked tensors with
    the originals, which stay in memory.
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
        memory: MemoryLimit,
        plans: bool = False,
        write_budget: WriteBudget | None = None,
        verify: bool = False,
    ) -> None:
        self._is_weight = is_weight
        self._before_forward = before_forward
        self._min_size = min_size
        self._verify = verify
        #: Returns what autograd holds in place of a streamed weight; is set before the first pass.
        self.save_weight: Callable[[torch.Tensor], Packed | None] = lambda tensor: None
        #: Is called when hooks are not allowed any more while blocks with such weights compute.
        self.keep_weights: Callable[[], None] = lambda: None
        self._writes = TierWrites(store, tiers, keep_originals=verify)
        self._open = _Open()
        #: Makes the profile of `latest_pass`.
        self.profiler = PassProfiler(self._writes)
        self.names = self.profiler.names
        #: The budget, if it goes by a plan.
        self.planned: PlannedBudget | None = None
        self._budget: Budget
        if plans:
            self._budget = self.planned = PlannedBudget(memory, self.profiler)
        elif budget == "auto":
            self._budget = AutomaticBudget(self._writes, most_backlog)
        else:
            self._budget = Budget(budget)
        self._write_budget = write_budget
        # What is not admitted stays as far as there is memory for it, unless so many are to leave.
        self._memory, self._spares = FreeMemory(memory.free_bytes), budget == "auto" and not plans
        self._prefetcher = Prefetcher(store, self._budget, prefetch_bytes)
        if self.planned is not None:
            self.planned.others_bytes = self._prefetcher.others_bytes
        announce_to(self._prefetcher)
        # Of a batch on the CPU.
        self._batch_bytes = 0
        self._hint = 0
        self._serials = itertools.count()
        self._saved = itertools.count()
        self.enabled = True
        self._unsupported = UnsupportedTensors()
        # Bytes that could have left and were kept, over all forward passes.
        self._kept_bytes = 0

    def figures(self) -> dict[str, float]:
        """Return current counts and bytes for metrics."""
        latest = self._prefetcher.latest_trace
        figures = {} if self.planned is None else self.planned.figures()
        figures |= {
            "missed_loads": self._prefetcher.missed_loads,
            "late_loads": self._prefetcher.late_loads,
            "kept_bytes": self._kept_bytes,
            "unsupported_bytes": self._unsupported.nbytes,
            "step_saved_bytes": latest.saved_bytes if latest else 0,
            "step_left_bytes": latest.left_bytes if latest else 0,
        }
        return {name: float(value) for name, value in figures.items()}

    def latest_pass(self) -> tuple[Trace, list[str], float] | None:
        """Return the pass of the last backward, the names of its items, and its end, or None."""
        latest = self._prefetcher.latest_trace
        if latest is None:
            return None
        names = [self.names.of(prefix) or "" for prefix in latest.prefixes]
        return latest, names, self._prefetcher.ended_at(latest)

    # ------------------------------------------------------------------ forward passes
    def hint(self) -> None:
        """Start a micro-batch: forward passes until the next hint belong together."""
        self._hint += 1

    def enter(self) -> saved_tensors_hooks | None:
        """Start a forward pass on this thread; return None if one is already running."""
        if not self.enabled or self._open.record is not None or not other_hooks.may_open():
            return None
        _, outer = other_hooks.ours_and_foreign(ActivationOffload)
        if self._min_size < sys.maxsize:
            other_hooks.refuse_hooks_that_offload(outer)
        self._before_forward()
        self._memory.begin_pass()
        if self._write_budget is not None:
            self._write_budget.begin_pass()
        self._writes.store.pass_begins()
        if (latest := self._prefetcher.latest_trace) is not None:
            self._batch_bytes = batch_bytes(latest.saved_bytes, self._writes.rate(write=True))
        # Ctrl-C between entering the hooks and recording it would leave them active for ever.
        with UninterruptedSection():
            hooks = other_hooks.behind(outer, self._pack, self._unpack)
            hooks.__enter__()
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
                self._writes.flush(record.trace, ended=True)
            else:
                self._writes.discard()

    @contextmanager
    def saving_weights(self) -> Iterator[bool]:
        """Save only streamed weights, by reference; yield whether hooks allow that."""
        allowed = other_hooks.may_open()
        owner, outer = other_hooks.ours_and_foreign(ActivationOffload)
        if not allowed or owner is self:
            yield allowed
            return
        with UninterruptedSection():
            hooks = other_hooks.behind(outer, self._pack_weight, self._unpack)
            hooks.__enter__()
            opened = other_hooks.innermost()
        try:
            yield True
        finally:
            # If Ctrl-C ended a backward pass, torch has removed all hooks that were entered in it.
            if other_hooks.innermost() == opened:
                hooks.__exit__(None, None, None)

    def _pack_weight(self, tensor: torch.Tensor) -> Packed:
        weight = self.save_weight(tensor)
        return KeptTensor(tensor) if weight is None else weight

    def _record(self) -> ForwardRecord:
        """Return the record of the new forward pass, or of its micro-batch if there is a hint."""
        opened = self._open
        latest = opened.latest if opened.hint == self._hint else None
        if latest is not None and not latest.in_backward:
            return latest
        record = ForwardRecord(next(self._serials))
        self._prefetcher.add(record)
        opened.latest, opened.hint = record if self._hint else None, self._hint
        return record

    # ------------------------------------------------------------------ hooks
    def _pack(self, tensor: torch.Tensor) -> Packed:
        if (weight := self.save_weight(tensor)) is not None:
            return weight
        record = self._open.record
        if record is None or not self.enabled or is_small(tensor, self._min_size):
            return KeptTensor(tensor)
        if self._writes.on_device:
            # Its memory is free once it was copied.
            self._writes.settle(record.trace, DEVICE_BATCH_BYTES)
        # Inside backward (a checkpointed region is recomputed) the tensor is needed at once.
        if torch._C._current_graph_task_id() != -1:
            return KeptTensor(tensor)
        reason = why_it_stays(tensor, self._is_weight)
        if reason is not None:
            self._unsupported.note(reason, tensor, self._min_size)
            return KeptTensor(tensor)
        wanted = reach(tensor)
        item = record.find(tensor, wanted)
        if item is not None:
            kind = KeptItem if item.ticket is None and item.payload is None else OffloadedTensor
            return kind(tensor, item, self._prefetcher)
        # Views of one activation (query, key, value) overlap: the whole is offloaded once. A small
        # view of a large tensor (a batch of a data set) must not offload all of it.
        span = reach_of_base(tensor, wanted)
        if len(wanted) < _WHOLE_BASE_SHARE * len(span) or not covers(span, wanted):
            span = wanted
        if len(span) < self._min_size:
            return KeptTensor(tensor)
        return self._new_item(tensor, span, record)

    def _new_item(self, tensor: torch.Tensor, span: range, record: ForwardRecord) -> Packed:
        trace, nbytes = record.trace, len(span)
        trace.saved_bytes += nbytes
        prefix = trace.prefix_with(tensor)
        device = tensor.device
        if is_asynchronous(device):
            # A pass may begin on the CPU, and what follows must leave the device all the same.
            self._writes.on_device = True
            if not trace.sizes:
                trace.on_device = True
                trace.device_times = DeviceTimes.of_pass(record.serial, device)
        idle, leaves_after = self._prefetcher.history.times(prefix)
        item = record.add(tensor, span, prefix)
        self.names.note(prefix, tensor)
        leaves = self._budget.admits(nbytes, trace, idle, leaves_after)
        if leaves and self._write_budget is not None:
            in_memory = self._writes.has_room_in_memory(nbytes)  # of a tier, where nothing wears
            within = in_memory or self._write_budget.admits(nbytes)
            stays = not within and self._budget.may_stay(trace)
            leaves = not (stays and self._memory.takes(nbytes, device))
        elif not leaves and self._spares:
            leaves = not self._memory.takes(nbytes, device)
        trace.memory_saved.append(trace.alive_bytes())
        if not leaves:
            self._kept_bytes += nbytes
            return KeptItem(tensor, item, self._prefetcher)
        handle = OffloadedTensor(tensor, item, self._prefetcher)
        lazy = handle.conjugated or handle.negated
        if nbytes == tensor.nbytes and tensor.is_contiguous() and not lazy:
            item.payload = tensor.detach()
        else:
            flat = torch.empty(0, dtype=torch.uint8, device=device)
            item.payload = flat.set_(tensor.untyped_storage(), span.start, (nbytes,), (1,))
        trace.left_bytes += nbytes
        together = self._batch_bytes if tensor.is_cpu else DEVICE_BATCH_BYTES
        # Backward starts with what was saved last: that stays if host memory is scarce.
        # This call comes last: see [Note: the interpreter lock].
        self._writes.add(item, -next(self._saved), together, device)
        return handle

    def _unpack(self, packed: Packed) -> torch.Tensor:
        tensor = packed.unpack()
        if self._verify and isinstance(packed, OffloadedTensor) and not packed.is_as_saved(tensor):
            name = self.names.of(packed.item.record.trace.prefixes[packed.item.number])
            raise OffloadError(
                f"a saved tensor ({name}) was changed between forward and backward, unnoticed by "
                f"autograd (`x.data`, `x.numpy()`, its storage, a kernel). Plain PyTorch computes "
                f"with the new values, and offload with those at the time of saving."
            )
        return tensor
