"""What leaves by a plan: as much as a limit of memory demands, and what is best to leave.

[Note: from the first steps to a plan]
Nothing is known of the first passes, so all that may leave does, and training waits where memory
would be used up. After some of them their traces tell what each item weighs and how long it lies
unused, and the paths what they carry: a lifetime plan (`planning.lifetimes`) says what leaves.
What else training has in memory (weights, gradients, what kernels need for a moment) is not in any
trace: it is the peak of a step less the items that were in memory at most, and the largest of the
last steps counts. The rest of the limit is the room for items. A plan is made anew when the room
has changed by much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload_strategy.activations.budget import Traffic
from offload_strategy.activations.order import Trace
from offload_strategy.activations.outbox import Outbox
from offload_strategy.errors import ConfigError
from offload_strategy.planning import LifetimePlan, PathRates, Profile, TensorLife, plan_lifetimes
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Share of the room that is left which items get in the first passes.
_FIRST_SHARE = 0.35
_LEAST_ROOM_BYTES = 32 * MiB
#: Of all passes that were planned for, whose kinds are remembered.
_MOST_ITEMS = 65536
#: Share of what there is, where no limit is given.
_FREE_SHARE = 0.95
#: Share of the limit that is left free: steps differ a little.
_MARGIN = 0.015
#: Steps of which the one counts that needed most beside the items.
_STEPS_SEEN = 4
#: By what share of the limit the room must have changed for a new plan: too small, or too large.
_LESS, _MORE = 0.005, 0.03
#: Seconds for which training waits for room at most, each time: a path that is so slow has failed,
#: and says so elsewhere.
_PATIENCE_SECONDS = 60.0


class Meter(Protocol):
    """Tells how much memory there was in use."""

    def start_over(self) -> None:
        """Forget what was."""

    def peak_bytes(self) -> int:
        """At most, since then."""

    def used_bytes(self) -> int:
        """At this moment."""

    def total_bytes(self) -> int:
        """What there is in all."""


@dataclass(slots=True)
class MemoryLimit:
    """A limit of memory, and what looks at it.

    Args:
        nbytes: that training may have in memory at most; None for what is free when it begins.
        profile_passes: how many passes to look at before the first plan.
        meter: of that memory; to be set before the first pass.
    """

    nbytes: int | None
    profile_passes: int
    meter: Meter | None = None


class PlannedBudget:
    """A limit of memory, and a plan that keeps to it; see [Note: from the first steps to a plan].

    Args:
        traffic: of the tiers.
        limit: of memory.
        outbox: of items that are about to be given to the tiers.

    Raises:
        ConfigError: in the first forward pass, where the limit is used up already.
    """

    recalls = True

    def __init__(self, traffic: Traffic, limit: MemoryLimit, outbox: Outbox) -> None:
        self._traffic = traffic
        self._memory = limit
        self._outbox = outbox
        self._passes_left = limit.profile_passes
        self._limit = 0
        #: Bytes of items of other passes than the given one that are in memory.
        self.others_bytes: Callable[[Trace], int] = lambda trace: 0
        #: Bytes of items that may be in memory; None before the first pass.
        self._room: int | None = None
        self._planned_room = 0
        self._most_items = 0
        self._told = self._observed = False
        self._others: deque[int] = deque(maxlen=_STEPS_SEEN)
        #: By what a pass looks like up to an item: whether it leaves.
        self._leaves: dict[int, bool] = {}
        self.plan: LifetimePlan | None = None
        self.profile: Profile | None = None
        #: Items that were not in the plan, or had to leave although it said that they stay.
        self.deviations = 0
        self.over_limit_passes = 0
        #: Of the last step.
        self.latest_peak_bytes = 0

    def figures(self) -> dict[str, float]:
        """Figures of this moment, for metrics: bytes and counts."""
        return {
            "plan_limit_bytes": float(self._limit),
            "plan_peak_bytes": float(self.latest_peak_bytes),
            "plan_deviations": float(self.deviations),
            "plan_over_limit_passes": float(self.over_limit_passes),
        }

    @property
    def others_peak_bytes(self) -> int:
        """What training has in memory beside saved tensors, at most."""
        return max(self._others, default=0)

    @property
    def _meter(self) -> Meter:
        assert self._memory.meter is not None
        return self._memory.meter

    def admits(self, nbytes: int, trace: Trace, idle: float | None) -> bool:
        """Whether an item leaves; waits for room. See `FixedBudget.admits`."""
        if self._room is None:
            self._begin()
        elif trace.saved_bytes == nbytes:
            self._begin_pass()
        assert self._room is not None
        leaves = True
        kept = trace.saved_bytes - nbytes - trace.left_bytes + self.others_bytes(trace)
        if self.plan is not None:
            known = self._leaves.get(trace.signature)
            too_much = known is False and kept + nbytes > self._room
            self.deviations += known is None or too_much
            leaves = known is None or known or too_much
        self._wait_for_room(kept + nbytes, trace)
        return leaves

    def observe(self, trace: Trace) -> None:
        """A backward pass is over: learn how much memory there was in use, and plan."""
        if self._room is None:
            return
        self.latest_peak_bytes = peak = self._meter.peak_bytes()
        self.over_limit_passes += peak > self._limit
        self._others.append(max(0, peak - self._most_items))
        self._observed = True
        room = int(self._limit * (1 - _MARGIN)) - self.others_peak_bytes
        self._room = max(room, _LEAST_ROOM_BYTES)
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        if room < _LEAST_ROOM_BYTES and not self._told:
            self._told = True
            logger.warning(
                "planning.device_memory: %s cannot be kept: a step takes %s with next to nothing "
                "that is saved in memory. Give more, or train with a smaller batch.",
                format_size(self._limit),
                format_size(peak),
            )
        changed = self._room - self._planned_room
        worth = not -_LESS * self._limit < changed < _MORE * self._limit
        if self.plan is None or worth or trace.signature not in self._leaves:
            self._make_plan(trace)

    def room(self, trace: Trace, kept_bytes: int) -> int | None:
        """See `FixedBudget.room`."""
        if self._room is None:
            return None
        return max(0, self._room - kept_bytes - self.others_bytes(trace))

    # ------------------------------------------------------------------ inside
    def _begin_pass(self) -> None:
        """Note what came after backward (an optimizer's step), and look anew."""
        after = self._meter.peak_bytes()
        # Of a pass without a backward, most of that peak is its items.
        if self._observed and after > self.latest_peak_bytes:
            self._others[-1] += after - self.latest_peak_bytes
        self._observed = False
        self._most_items = 0
        self._meter.start_over()

    def _begin(self) -> None:
        used = self._meter.used_bytes()
        given = self._memory.nbytes
        self._limit = int(_FREE_SHARE * self._meter.total_bytes()) if given is None else given
        if used >= self._limit:
            raise ConfigError(
                f"planning.device_memory is {format_size(self._limit)}, and {format_size(used)} "
                "are in use before the first forward pass. Give more, or let optimizer states and "
                "weights leave as well."
            )
        self._room = max(_LEAST_ROOM_BYTES, int(_FIRST_SHARE * (self._limit - used)))
        self._meter.start_over()

    def _wait_for_room(self, kept: int, trace: Trace) -> None:
        """Wait until what is kept and what is on its way fit into the room."""
        assert self._room is not None
        traffic = self._traffic
        items = kept + traffic.writing_bytes() + self._outbox.nbytes
        self._most_items = max(self._most_items, min(items, self._room))
        if items <= self._room:
            return
        self._outbox.empty()
        at_most = max(0, self._room - kept)
        if traffic.writing_bytes() > at_most:
            trace.held += traffic.await_writing_at_most(at_most, _PATIENCE_SECONDS)

    def _make_plan(self, trace: Trace) -> None:
        profile = profile_of(trace, self._traffic)
        if profile is None:
            return
        assert self._room is not None
        self.profile, self._planned_room = profile, self._room
        self.plan = plan_lifetimes(profile, self._room)
        leave = {move.tensor for move in self.plan.moves}
        if len(self._leaves) > _MOST_ITEMS:
            self._leaves.clear()
        for number, prefix in enumerate(trace.prefixes):
            self._leaves[prefix] = number in leave
        logger.info(
            "planning.device_memory %s: of %s that a forward pass saves %s leave, %s stay%s",
            format_size(self._limit),
            format_size(trace.saved_bytes),
            format_size(self.plan.moved_bytes),
            format_size(trace.saved_bytes - self.plan.moved_bytes),
            "" if self.plan.hidden else "; training waits for some of them",
        )


def profile_of(
    trace: Trace,
    traffic: Traffic,
    *,
    busy: Sequence[tuple[float, float]] = (),
    other_bytes: int = 0,
) -> Profile | None:
    """What a pass made and used, without the times in which it waited.

    Args:
        trace: of a pass whose backward is over.
        traffic: of the tiers.
        busy: when something else ran on its thread: left out as well.
        other_bytes: in memory beside what it saved.

    Returns:
        The profile; None if nothing was used.
    """
    if not trace.uses:
        return None
    start = trace.started_at
    used = {
        number: at - start - trace.held - waited - _before(at, busy)
        for number, at, waited in trace.uses
    }
    step = used[trace.uses[-1][0]]
    forward = max(0.0, min(used.values()))
    tensors = []
    for number, nbytes in enumerate(trace.sizes):
        saved = max(0.0, trace.saved_at[number] - start - trace.held_at[number])
        # What backward has not used lies there until it is over.
        tensors.append(
            TensorLife(f"item {number}", nbytes, (saved, max(saved, used.get(number, step))))
        )
    # A path that was never busy moves what leaves in a pass, at least.
    known = [traffic.rate(write=write) for write in (False, True)]
    read, write = (rate or max(1.0, 2 * trace.left_bytes / max(step, 1e-6)) for rate in known)
    return Profile(
        forward_seconds=min(forward, step),
        step_seconds=step,
        tensors=tuple(tensors),
        other_bytes=other_bytes,
        paths=(PathRates("tiers", read=read, write=write),),
    )


def _before(moment: float, busy: Sequence[tuple[float, float]]) -> float:
    """Seconds of spans that lie before a moment."""
    return sum(min(end, moment) - begin for begin, end in busy if begin < moment)
