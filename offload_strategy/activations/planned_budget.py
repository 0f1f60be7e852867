"""What leaves by a plan: as much as a limit of memory demands, and what is best to leave.

[Note: from the first steps to a plan]
Nothing is known of the first passes, so all that may leave does, and training waits where memory
would be used up. After some of them their traces tell what each item weighs and how long it lies
unused, the paths what they carry, and a meter what else training has in memory from moment to
moment (beside.py): a lifetime plan (`planning.lifetimes`) says what leaves. What the limit leaves
beside all else is the room for items. A plan is made anew when that has changed by much.

With a plan it is decided, once, which blocks are computed again (planning/recompute.py). The passes
after it look different then: they are profiled and planned as any new kind of pass is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from offload_strategy.activations.baseline_memory import MemoryBeside, Meter
from offload_strategy.activations.batcher import Outbox
from offload_strategy.activations.offload_budget import Traffic
from offload_strategy.activations.pass_profile import profile_of, use_event
from offload_strategy.activations.recomputed_blocks import RecomputableBlocks
from offload_strategy.activations.tensor_names import ItemNames
from offload_strategy.activations.transfer_overhead import Toll
from offload_strategy.activations.use_order import Trace
from offload_strategy.config import PlanningConfig
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, plan_lifetimes, within
from offload_strategy.plan_runtime.plan_file import GivenPlan, load_plan
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.recompute_mix import choose_mix
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Share of the room that is left which items get in the first passes.
_FIRST_SHARE = 0.35
_LEAST_ROOM_BYTES = 32 * MiB
#: What is loaded is there for some uses: the room of the one that needs most beside it counts.
_USES_AHEAD = 8
#: Of all passes that were planned for, whose kinds are remembered.
_MOST_ITEMS = 65536
#: Share of what there is, where no limit is given.
_FREE_SHARE = 0.95
#: By what share of the limit the room must have changed for a new plan: too small, or too large.
_LESS, _MORE = 0.005, 0.03
#: How often blocks are chosen that are computed again.
_CHOICES = 3
#: Seconds for which training waits for room at most, each time: a path that is so slow has failed,
#: and says so elsewhere.
_PATIENCE_SECONDS = 60.0


@dataclass(slots=True)
class MemoryLimit:
    """A limit of memory, and what looks at it.

    Args:
        nbytes: that training may have in memory at most; None for what is free when it begins.
        profile_passes: how many passes to look at before the first plan.
        meter: of that memory; to be set before the first pass.
        given: what is to become of each item, and which blocks are computed again; None to find
            out.
    """

    nbytes: int | None
    profile_passes: int
    meter: Meter | None = None
    given: GivenPlan | None = None

    @classmethod
    def configured(cls, section: PlanningConfig) -> MemoryLimit | None:
        """That of a config, if it has one.

        Raises:
            ConfigError: its plan cannot be read.
        """
        if section.device_memory is None:
            return None
        nbytes = None if section.device_memory == "auto" else int(section.device_memory)
        given = None if section.plan is None else load_plan(section.plan)
        return cls(nbytes, section.profile_steps, given=given)


class PlannedBudget:
    """A limit of memory, and a plan that keeps to it; see [Note: from the first steps to a plan].

    Args:
        traffic: of the tiers.
        limit: of memory.
        outbox: of items that are about to be given to the tiers.
        names: of items, for people.
        blocks: that may be computed again.

    Raises:
        ConfigError: in the first forward pass, where the limit is used up already.
    """

    def __init__(
        self,
        traffic: Traffic,
        limit: MemoryLimit,
        outbox: Outbox,
        names: ItemNames | None = None,
        blocks: RecomputableBlocks | None = None,
    ) -> None:
        self._traffic = traffic
        self._names = names
        self._blocks = blocks
        self._choices_left = _CHOICES
        if blocks is not None and limit.given is not None:
            blocks.want(limit.given.recomputed)
            self._choices_left = 0
        self._memory = limit
        self._outbox = outbox
        self._passes_left = limit.profile_passes
        self._limit = 0
        #: Bytes of items of other passes than the given one that are in memory.
        self.others_bytes: Callable[[Trace], int] = lambda trace: 0
        #: What else there is; None before the first pass.
        self.beside: MemoryBeside | None = None
        # Bytes of items that may be in memory in the first pass.
        self._first_room: int | None = None
        self._planned_for: int | None = None
        self._told = False
        # The pass whose backward was over last, until the next one begins.
        self._over: Trace | None = None
        #: By what a pass looks like up to an item: until when others hold on to it, in seconds from
        #: the begin of the pass.
        self.held_until: dict[int, float] = {}
        #: Likewise: whether it leaves.
        self._leaves: dict[int, bool] = {}
        self.plan: LifetimePlan | None = None
        self.profile: Profile | None = None
        self.toll = Toll()
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
            "plan_recomputed_blocks": float(len(self._blocks.recomputed) if self._blocks else 0),
        }

    @property
    def _meter(self) -> Meter:
        assert self._memory.meter is not None
        return self._memory.meter

    def admits(self, nbytes: int, trace: Trace, idle: float | None) -> bool:
        """Whether an item leaves; waits for room. See `FixedBudget.admits`."""
        if self.beside is None:
            self.beside = self._begin(nbytes)
        elif trace.saved_bytes == nbytes:
            self._begin_pass(trace, self.beside)
        leaves = True
        begin = time.perf_counter()
        self._traffic.let_go()
        items = trace.alive_bytes() + self.others_bytes(trace)
        self.beside.arrive(trace.signature, items - nbytes)
        room = self._room_after(trace.signature, self.beside)
        # What must stay, and what is in memory as others hold on to it.
        stays = items - nbytes - self._leaving_bytes()
        if self.plan is not None or self._memory.given is not None:
            known = self._decided(nbytes, trace)
            too_much = known is False and stays + nbytes > room
            self.deviations += known is None or too_much
            leaves = known is None or known or too_much
        self._wait_for_room(items, room)
        self.beside.go_on(trace.alive_bytes() + self.others_bytes(trace))
        # To look closely takes its time, too.
        trace.held += time.perf_counter() - begin
        return leaves

    def must_leave(self, trace: Trace) -> int | None:
        """What there is no room for when backward begins; see `FixedBudget.must_leave`."""
        if self.beside is None:
            return 0
        items = trace.alive_bytes() + self.others_bytes(trace)
        return max(0, items - self._room_from(trace, 0, self.beside))

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """Backward uses an item for the first time. See `FixedBudget.uses`."""
        if self.beside is not None:
            begin = time.perf_counter()
            if self._meter.counts_host_buffers:
                self._traffic.keep_idle(0)
            self._traffic.let_go()
            use = len(trace.uses) - 1
            items = trace.alive_bytes() + loaded_bytes + self.others_bytes(trace)
            self.beside.arrive(use_event(trace, use), items + nbytes)
            self._wait_for_room(items, self._room_from(trace, use, self.beside))
            # Its own bytes count among what its use needs from now on.
            self.beside.go_on(items)
            trace.waited += time.perf_counter() - begin

    def observe(self, trace: Trace) -> None:
        """A backward pass is over: what comes until the next pass belongs to it."""
        if self.beside is not None:
            self.latest_peak_bytes = self.beside.look()
            self._over = trace
            self.toll.observe(trace)
            for number, until in trace.held_until.items():
                held = 0.0 if until is None else until - trace.started_at
                self.held_until[trace.prefixes[number]] = held

    def room(self, trace: Trace) -> int | None:
        """See `FixedBudget.room`."""
        if self.beside is None:
            return None
        room = self._room_from(trace, len(trace.uses) - 1, self.beside)
        return max(0, room - trace.alive_bytes() - self.others_bytes(trace))

    # ------------------------------------------------------------------ passes
    def _begin(self, nbytes: int) -> MemoryBeside:
        used = self._meter.used_bytes() - nbytes
        given = self._memory.nbytes
        self._limit = int(_FREE_SHARE * self._meter.total_bytes()) if given is None else given
        if used >= self._limit:
            raise ConfigError(
                f"planning.device_memory is {format_size(self._limit)}, and {format_size(used)} "
                "are in use before the first forward pass. Give more, or let optimizer states and "
                "weights leave as well."
            )
        self._first_room = max(_LEAST_ROOM_BYTES, int(_FIRST_SHARE * (self._limit - used)))
        beside = MemoryBeside(self._meter, self._memory.profile_passes)
        beside.begin(0)
        return beside

    def _begin_pass(self, trace: Trace, beside: MemoryBeside) -> None:
        """Learn from the last pass, with what came after its backward, and plan."""
        others = self.others_bytes(trace)
        over, self._over = self._over, None
        closely = beside.closely
        peak = beside.end(others, learn=over is not None)
        beside.begin(others)
        if over is None:
            return
        self._first_room = None
        self.latest_peak_bytes = peak
        self.over_limit_passes += peak > self._limit
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        if self._target - beside.most_bytes < _LEAST_ROOM_BYTES and not self._told:
            self._told = True
            logger.warning(
                "planning.device_memory: %s cannot be kept: a step takes %s with next to nothing "
                "that is saved in memory. Give more, or train with a smaller batch.",
                format_size(self._limit),
                format_size(beside.most_bytes),
            )
        known = self._planned_for
        fuller = 0 if known is None else beside.correction - known
        worth = not -_MORE * self._limit < fuller < _LESS * self._limit
        if known is None or closely or worth or over.signature not in self._leaves:
            self._make_plan(over, beside, trace.started_at, closely=closely)

    def _decided(self, nbytes: int, trace: Trace) -> bool | None:
        """Whether an item leaves by the plan, or by a file; None where neither knows it."""
        given, number = self._memory.given, len(trace.sizes) - 1
        items = () if given is None else given.items
        if number < len(items) and items[number].bytes == nbytes:
            return items[number].leaves
        return self._leaves.get(trace.signature)

    @property
    def _target(self) -> int:
        return within(self._limit)

    # ------------------------------------------------------------------ room
    def _leaving_bytes(self) -> int:
        return self._traffic.own_writing_bytes() + self._outbox.nbytes

    def _room_after(self, event: int, beside: MemoryBeside) -> int:
        if self._first_room is not None:
            return self._first_room
        return max(_LEAST_ROOM_BYTES, self._target - beside.after(event))

    def _room_from(self, trace: Trace, use: int, beside: MemoryBeside) -> int:
        """The least room after a use and some that follow it."""
        uses = range(max(0, use), max(1, min(use + _USES_AHEAD, len(trace.sizes))))
        return min(self._room_after(use_event(trace, one), beside) for one in uses)

    def _wait_for_room(self, items: int, room: int) -> None:
        """Wait until what is in memory fits into the room, as far as it is on its way out."""
        if items <= room:
            return
        self._outbox.empty()
        at_most = max(0, self._traffic.own_writing_bytes() - (items - room))
        if self._traffic.own_writing_bytes() > at_most:
            self._traffic.await_own_writing_at_most(at_most, _PATIENCE_SECONDS)

    def _make_plan(
        self, trace: Trace, beside: MemoryBeside, ended_at: float, *, closely: bool
    ) -> None:
        profile = profile_of(
            trace,
            self._traffic,
            self._names,
            beside=beside,
            held_until=self.held_until,
            ended_at=ended_at,
            blocks=self._blocks,
            toll=self.toll,
        )
        if profile is None:
            return
        self.profile, self._planned_for = profile, beside.correction
        if self.plan is None:
            # With a plan buffers for what is on its way are fewer.
            beside.look_closely()
        blocks = self._blocks
        # What is computed again changes memory between events, which only a close look tells.
        if blocks is not None and not blocks.settled and (closely or not blocks.recomputed):
            self._recompute(profile, blocks)
        self.plan = plan_lifetimes(profile, self._target)
        leave = {move.tensor for move in self.plan.moves}
        if len(self._leaves) > _MOST_ITEMS:
            self._leaves.clear()
            self.held_until.clear()
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

    def _recompute(self, profile: Profile, blocks: RecomputableBlocks) -> None:
        """Choose blocks, and later further ones: the first choice knows little of the paths."""
        if not self._choices_left:
            blocks.settle()
            return
        if any(block.name in blocks.recomputed for block in profile.blocks):
            return  # it is of a pass from before the last choice
        mix = choose_mix(profile, self._target)
        if mix.recomputed:
            self._choices_left -= 1
            blocks.want(mix.recomputed)
            logger.info(
                "planning.device_memory: %d %sblocks of %d are computed again in backward, as the "
                "tiers take less than would have to leave: %s",
                len(mix.recomputed),
                "more " if blocks.recomputed else "",
                len(profile.blocks),
                ", ".join(mix.recomputed),
            )
        elif blocks.recomputed and mix.plan.hidden:
            blocks.settle()
