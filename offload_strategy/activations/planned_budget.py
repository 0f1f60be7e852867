"""A budget that offloads by a lifetime plan, as much as a limit of memory requires.

[Note: from the first steps to a plan]
In the first passes everything that may leave is offloaded, and training waits when memory would be
used up. Then the traces of these passes give the sizes and idle times of items, the paths give
their rates, and a meter gives the baseline memory (`baseline_memory`): a lifetime plan
(`plan_runtime.lifetime_plan`) selects what is offloaded. The room for items is the limit minus the
baseline memory. A new plan is made if the room has changed by much.

If the engine decides what leaves (``mode: auto``), everything stays at first, and only peaks of
steps are measured, until a pass saves more than is certain to fit; from there on it is as above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from timeit import default_timer as perf_counter

import torch

from offload_strategy.activations.baseline_memory import BaselineMemory
from offload_strategy.activations.budgets import Budget
from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.pass_profile import PassProfiler, use_event
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.c_allocator import freed_memory, reuse_freed_memory
from offload_strategy.host_memory.idle_memory import RETURN_SHARE, TrimmingNearLimit
from offload_strategy.host_memory.memory_limits import PeakMeter, free_bytes
from offload_strategy.plan_runtime.lifetime_plan import (
    CHECKPOINT,
    GivenPlan,
    LifetimePlan,
    least_room,
    plan_lifetimes,
    usable_bytes,
)
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Share of the free memory that items get in the first passes.
_FIRST_SHARE = 0.35
#: Share of the limit up to which everything stays, if the engine decides what leaves: the rest is
#: for workspaces of kernels and for the allocator, which are not known without measuring.
_CERTAIN_SHARE = 0.75
#: Share of the limit up to which a step may go that has been seen before, and share from which on
#: steps are looked at.
_SEEN_SHARE, _SCARCE_SHARE = 0.9, 0.25
#: What is loaded ahead stays until its use, so the largest baseline memory of the next uses counts:
#: of so many at least, and of those of so many bytes, but of no more than so many.
_USES_AHEAD, _BYTES_AHEAD, _MOST_AHEAD = 8, 32 * MiB, 512
#: Largest number of items whose plan is remembered.
_MOST_ITEMS = 65536
#: Share of the limit by which the room must shrink, or grow, for a new plan.
_LESS, _MORE = 0.005, 0.03
#: Share of the limit that idle buffers may take: those of states, gradients and weights on their
#: way are used in turn, and new mappings of them took a tenth of a step.
_IDLE_SHARE = 0.125
_WAITS = f"; the tiers are too slow for that, and training waits. To wait less, {CHECKPOINT}"


@dataclass(slots=True)
class MemoryLimit:
    """Most bytes that training may use (None: what is free at the start), and a plan from a file.

    `profile_passes` come before the first plan; `meter` must be set before the first pass. If the
    engine decides what leaves, `upcoming_bytes` returns what training will need besides what is in
    use and what is saved; `steps`, how often optimizers have stepped. `name` is that of the setting
    in the config. So many `processes` share what is free of the machine's memory.
    """

    nbytes: int | None
    profile_passes: int
    meter: PeakMeter | None = None
    given: GivenPlan | None = None
    upcoming_bytes: Callable[[], int] | None = None
    steps: Callable[[], int] = lambda: 0
    name: str = "planning.device_memory"
    processes: int = 1

    def measure(self, parameter: torch.Tensor) -> PeakMeter:
        """Measure the memory of a parameter's device, unless one is measured already."""
        if self.meter is None:
            self.meter = PeakMeter(parameter)
        return self.meter

    def limit_bytes(self) -> int:
        """Return the limit, which is what is free now if none was given."""
        assert self.meter is not None
        if self.nbytes is not None:
            return self.nbytes
        return self.meter.default_limit_bytes(self.processes)

    def free_bytes(self, device: torch.device) -> int:
        """Return the free bytes of a device, within the limit if that is measured there."""
        if self.meter is not None and self.meter.device == device:
            return self.limit_bytes() - self.meter.used_bytes()
        return free_bytes(device, self.processes)


class PlannedBudget(Budget):
    """Keeps training within a limit; see [Note: from the first steps to a plan]."""

    def __init__(self, limit: MemoryLimit, profiler: PassProfiler) -> None:
        super().__init__()
        self._memory = limit
        self._profiler = profiler
        self._writes = profiler.writes
        self._passes_left = limit.profile_passes
        #: The limit in bytes, once something is measured, and what may be planned for.
        self.limit_bytes = self.usable_bytes = 0
        #: Returns the bytes in memory of items of passes other than the given one.
        self.others_bytes: Callable[[Trace], int] = lambda trace: 0
        # Bytes of a pass that may stay while nothing is measured, and in the first measured pass.
        self._certain_room = 0
        # By the peak of the last step. If that of this step is measured: its latest pass, the least
        # and the most that its passes before have saved, and what was upcoming at its start.
        self._seen_room = self._least = self._most = self._upcoming = 0
        self._seen_steps = -1
        self._current: Trace | None = None
        self._first_room: int | None = None
        # `BaselineMemory.correction` at the last plan.
        self._planned_for = 0
        # If the device is the CPU, whose memory is that of the C library.
        self._freed: TrimmingNearLimit | None = None
        # Bytes that may wait in memory and do at the latest event.
        self._waiting_bytes = 0
        self._told = False
        # The pass whose backward ended last, until the next one starts; the last with known times.
        self._over: Trace | None = None
        self._timed: Trace | None = None
        #: Whether an item is offloaded, by its prefix.
        self._leaves: dict[int, bool] = {}
        # The largest baseline memory ahead, by use, for a kind of pass and a correction.
        self._most_ahead: dict[int, int] = {}
        self._ahead_of: tuple[int, int] | None = None
        self.plan: LifetimePlan | None = None
        self.profile: Profile | None = None
        #: Items that the plan did not know, or that had to be offloaded against the plan.
        self.deviations = 0
        self.over_limit_passes = 0
        #: Peak of the last step.
        self.latest_peak_bytes = 0

    def figures(self) -> dict[str, float]:
        """Return current bytes and counts for metrics."""
        baseline = self._profiler.baseline
        return {
            "plan_limit_bytes": self.limit_bytes,
            "plan_peak_bytes": self.latest_peak_bytes,
            "plan_kept_bytes": 0 if baseline is None else baseline.kept_bytes,
            "plan_deviations": self.deviations,
            "plan_over_limit_passes": self.over_limit_passes,
        }

    @property
    def _baseline(self) -> BaselineMemory:
        """Baseline memory, which exists from the first item on."""
        assert self._profiler.baseline is not None
        return self._profiler.baseline

    def admits(
        self, nbytes: int, trace: Trace, idle: float | None, leaves_after: float | None = None
    ) -> bool:
        """See `Budget.admits`; waits for room in memory."""
        if self._profiler.baseline is None:
            if self._memory.upcoming_bytes is not None and trace.saved_bytes == nbytes:
                self._certain_room = self._certain(nbytes, trace)  # of a new pass
            if trace.saved_bytes <= self._certain_room:
                self._return_freed()
                return False
            self._begin(nbytes if self._memory.upcoming_bytes is None else trace.alive_bytes())
        elif trace.saved_bytes == nbytes:
            self._begin_pass(trace)
        leaves, baseline = True, self._baseline
        begin = perf_counter()
        self._free_what_left()
        items = self._items_bytes(trace)
        baseline.record_event(trace.signature, items - nbytes)
        room = self._room_after(trace.signature)
        if self.plan is not None or self._memory.given is not None:
            known = self._decided(nbytes, trace)
            # Items that must stay, and items that others reference, do not leave.
            too_much = known is False and items - self._writes.leaving_bytes() > room
            self.deviations += known is None or too_much
            leaves = known is None or known or too_much
        self._writes.release_at_least(items - room)
        baseline.resume(self._items_bytes(trace))
        # Measuring takes time, too.
        trace.held += perf_counter() - begin
        return leaves

    def may_stay(self, trace: Trace) -> bool:
        """See `Budget.may_stay`."""
        stays = self._items_bytes(trace) - self._writes.leaving_bytes()
        return stays <= self._room_after(trace.signature)

    def must_leave(self, trace: Trace) -> int | None:
        """See `Budget.must_leave`: the bytes for which there is no room."""
        if self._profiler.baseline is None:
            return 0
        return max(0, self._items_bytes(trace) - self._room_from(trace))

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """See `Budget.uses`; waits for room in memory."""
        if self._profiler.baseline is None:
            self._return_freed()
            return
        begin = perf_counter()
        self._free_what_left()
        use = len(trace.uses) - 1
        if use == 0 and self._freed is not None:
            freed_memory.note_reuse()  # the heap is fullest when forward ends
        items = loaded_bytes + self._items_bytes(trace)
        self._baseline.record_event(use_event(trace, use), items + nbytes)
        self._writes.release_at_least(items - self._room_from(trace))
        # From now on its bytes count as baseline memory of its use.
        self._baseline.resume(items)
        trace.waited += perf_counter() - begin

    def observe(self, trace: Trace) -> None:
        """See `Budget.observe`; what follows until the next pass belongs to this one."""
        if self._profiler.baseline is None:
            return
        self.latest_peak_bytes = self._baseline.look()
        self._over = trace
        self._profiler.held_until |= trace.held_until

    def learn(self, trace: Trace) -> None:
        """See `Budget.learn`."""
        if self._profiler.baseline is None:
            return
        self._timed = trace
        self._profiler.io_overhead.observe(trace)

    def room(self, trace: Trace) -> int | None:
        """See `Budget.room`."""
        if self._profiler.baseline is None:
            return None
        return max(0, self._room_from(trace) - self._items_bytes(trace))

    # ------------------------------------------------------------------ passes
    def _certain(self, nbytes: int, trace: Trace) -> int:
        """Return the bytes that a new pass may save without any doubt that there is room.

        What is known beforehand of a step leaves much to doubt, the peak of a step very little.
        """
        memory = self._memory
        assert memory.meter is not None
        assert memory.upcoming_bytes is not None
        limit = memory.limit_bytes()
        used, upcoming = memory.meter.used_bytes() - nbytes, memory.upcoming_bytes()
        looks = self._current is not None
        if self._current is not None:
            saved = self._current.saved_bytes
            self._least, self._most = min(self._least, saved), max(self._most, saved)
        if memory.steps() > self._seen_steps:
            self._seen_steps, self._seen_room = memory.steps(), 0
            # States that are there from now on were not there at the peak of the first step.
            if looks and upcoming >= self._upcoming:
                peak = memory.meter.peak_bytes()
                left = int(_SEEN_SHARE * limit) - peak
                if memory.meter.counts_freed and peak <= RETURN_SHARE * limit:
                    left = max(0, left)  # what is closer was kept because there was room
                self._seen_room = min(self._most, self._least + left)
            self._least, self._most, self._upcoming = limit, 0, upcoming
            looks = used + upcoming > _SCARCE_SHARE * limit
            if looks:
                memory.meter.reset_peak()
                looks = memory.meter.resets
            if looks and self._freed is None and memory.meter.counts_host_buffers:
                self._freed = TrimmingNearLimit(limit)
        self._current = trace if looks else None
        certain = int(_CERTAIN_SHARE * limit) - used - upcoming
        return max(certain, self._seen_room - self.others_bytes(trace))

    def _begin(self, items: int) -> None:
        memory = self._memory
        assert memory.meter is not None
        self.limit_bytes = memory.limit_bytes()
        self._writes.store.pool.device_may_wait = False  # the plan fills the device up to its limit
        if memory.meter.counts_host_buffers:
            reuse_freed_memory()
            freed_memory.return_all()
        # From now on it is known whether memory of freed tensors is counted.
        self.usable_bytes = usable_bytes(self.limit_bytes, keeps_freed=memory.meter.counts_freed)
        used = memory.meter.used_bytes() - items
        if used >= self.limit_bytes:
            raise ConfigError(
                f"{memory.name} is {format_size(self.limit_bytes)}, and {format_size(used)} are in "
                "use before the first forward pass. Give more, or let optimizer states and weights "
                "leave as well."
            )
        free = self.limit_bytes - used - (memory.upcoming_bytes() if memory.upcoming_bytes else 0)
        # What has been kept until now stays.
        self._first_room = max(least_room(self.usable_bytes), int(_FIRST_SHARE * free), items)
        if memory.meter.counts_host_buffers:
            self._freed = TrimmingNearLimit(self.limit_bytes)
            pool, limit = self._writes.store.pool, self.limit_bytes
            pool.keep_idle(int(_IDLE_SHARE * limit))
            pool.limit_process(lambda: limit, is_scarce=True)
        self._profiler.baseline = BaselineMemory(
            memory.meter, memory.profile_passes, self.limit_bytes, self._writes.store.pool.trim
        )

    def _begin_pass(self, trace: Trace) -> None:
        """Learn from the last pass with everything that followed its backward, and plan."""
        baseline, per_event = self._baseline, self._baseline.per_event
        others = self.others_bytes(trace)
        over, self._over = self._over, None
        # What waited after the last use did so until `step()`.
        peak = 0 if over is None else baseline.end(others + self._waiting_bytes)
        baseline.begin(others + self._look_at_waiting())
        if over is None:
            return
        self._first_room = None
        self.latest_peak_bytes = peak
        self.over_limit_passes += peak > self.limit_bytes
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        most = baseline.after(None)
        scarce = self.usable_bytes - most < least_room(self.usable_bytes)
        if self._memory.upcoming_bytes is not None:
            # It was not asked for: only what happens counts.
            scarce &= peak > self.limit_bytes
        if scarce and not self._told:
            self._told = True
            logger.warning(
                f"{self._memory.name}: {format_size(self.limit_bytes)} cannot be kept: a step "
                f"takes {format_size(most)} with next to nothing that is saved in "
                f"memory. Give more, train with a smaller batch, or {CHECKPOINT}."
            )
        timed = self._timed
        if timed is None or timed.signature != over.signature:
            return  # the device has not told the times of such a pass
        fuller = baseline.correction - self._planned_for
        worth = not -_MORE * self.limit_bytes < fuller < _LESS * self.limit_bytes
        if per_event or worth or over.signature not in self._leaves:
            self._make_plan(timed, timed.uses[-1][1] + (trace.started_at - over.uses[-1][1]))

    def _decided(self, nbytes: int, trace: Trace) -> bool | None:
        """Return whether an item is offloaded by the plan or a file; None if neither knows it."""
        given, number = self._memory.given, len(trace.sizes) - 1
        items = () if given is None else given.items
        if number < len(items) and items[number].bytes == nbytes:
            return items[number].does == "leaves"
        return self._leaves.get(trace.signature)

    # ------------------------------------------------------------------ room
    def _return_freed(self) -> None:
        if self._freed is not None:
            self._freed.look()

    def _free_what_left(self) -> None:
        self._return_freed()
        self._writes.store.registry.release_written()

    def _items_bytes(self, trace: Trace) -> int:
        """Return the bytes of items in memory; what may wait there is counted like them."""
        return trace.alive_bytes() + self.others_bytes(trace) + self._look_at_waiting()

    def _look_at_waiting(self) -> int:
        assert self._memory.meter is not None
        if self._memory.meter.counts_host_buffers:
            self._waiting_bytes = self._writes.store.pool.waiting_bytes
        return self._waiting_bytes

    def _room_after(self, event: int) -> int:
        if self._first_room is not None:
            return self._first_room + self._waiting_bytes
        return max(least_room(self.usable_bytes), self.usable_bytes - self._baseline.after(event))

    def _room_from(self, trace: Trace) -> int:
        """Return the smallest room after the latest use, or the first, and some following ones."""
        if self._first_room is not None:
            return self._first_room + self._waiting_bytes
        baseline, use = self._baseline, max(0, len(trace.uses) - 1)
        kind = (trace.signature, baseline.correction)
        if baseline.per_event or kind != self._ahead_of:
            self._most_ahead.clear()
            self._ahead_of = None if baseline.per_event else kind
        most = self._most_ahead.get(use)
        if most is None:
            most = self._most_ahead[use] = self._baseline_ahead(trace, use)
        return max(least_room(self.usable_bytes), self.usable_bytes - most)

    def _baseline_ahead(self, trace: Trace, use: int) -> int:
        """Return the largest baseline memory after a use and some following ones."""
        most = ahead = 0
        # Their sizes are those of the usual order of use: the reverse of saving.
        for one in range(use, min(len(trace.sizes), use + _MOST_AHEAD)):
            if one - use >= _USES_AHEAD and ahead > _BYTES_AHEAD:
                break
            most = max(most, self._baseline.after(use_event(trace, one)))
            ahead += trace.sizes[-1 - one]
        return most

    def _make_plan(self, trace: Trace, ended_at: float) -> None:
        profile = self._profiler.profile(trace, ended_at)
        self.profile, self._planned_for = profile, self._baseline.correction
        first, self.plan = self.plan is None, plan_lifetimes(profile, self.usable_bytes)
        if first and not self._baseline.meter.counts_freed:
            # With a plan there are fewer buffers in flight, so more may stay. Where freed memory is
            # returned for that, the pass takes longer, and the next ones need more than it did.
            self._baseline.measure_next_pass()
        leave = {move.tensor for move in self.plan.moves}
        if len(self._leaves) > _MOST_ITEMS:
            self._leaves.clear()
            self._profiler.held_until.clear()
        for number, prefix in enumerate(trace.prefixes):
            self._leaves[prefix] = number in leave
        saved, left = trace.saved_bytes, self.plan.moved_bytes
        logger.info(
            f"{self._memory.name} {format_size(self.limit_bytes)}: of {format_size(saved)} that a "
            f"forward pass saves {format_size(left)} leave, {format_size(saved - left)} stay"
            f"{'' if self.plan.hidden else _WAITS}"
        )
