"""Keep, move or compute again: what a step that does not fit had best do, under one cost.

[Note: one cost]
What is moved costs the time for which training waits for a path; nothing where the path keeps pace.
What is computed again costs its time in any case, and no path. So nothing is computed again as long
as all moves can be hidden. Where they cannot, blocks are, those first that take the least time for
a byte that need not be moved (Fuyou, section 4.5, from the other end: what saves the most computing
for a byte is swapped first), and the rest is planned by lifetimes. How many of them, a replay of
each mix tells: the one whose step is shortest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, plan_lifetimes
from offload_strategy.plan_runtime.profile import Block, Profile, TensorLife
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.plan_runtime.replay_lanes import StepReplay

#: Mixes that are replayed for each order of blocks, at most.
_MIXES = 8
#: By what share of the step another mix must be faster to compute more again.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Mix:
    """What becomes of a step.

    Args:
        recomputed: names of the blocks that are computed again.
        profile: of the step with that.
        plan: of what moves then.
        replay: of that.
    """

    recomputed: tuple[str, ...]
    profile: Profile
    plan: LifetimePlan
    replay: StepReplay


def choose_mix(profile: Profile, limit: int) -> Mix:
    """The fastest mix that fits, or the smallest of all; see [Note: one cost].

    Args:
        profile: of the step, with the blocks that may be computed again.
        limit: bytes of memory that it may require.
    """
    best = _mix(profile, limit, ())
    if not profile.blocks or (best.plan.fits and best.plan.hidden):
        return best
    for names in _candidates(profile):
        mix = _mix(profile, limit, names)
        if _is_better(mix, best):
            best = mix
    return best


def with_recomputed(profile: Profile, names: Sequence[str]) -> Profile:
    """The step in which some blocks are computed again in backward.

    Their tensors are made anew where backward first uses one of them, and do not leave then; their
    inputs are there until then, and may leave.

    Args:
        profile: of the step as it is.
        names: of the blocks.
    """
    again = sorted(
        (_Recomputed(block, profile) for block in profile.blocks if block.name in names),
        key=lambda one: one.begins_at,
    )
    if not again:
        return profile

    def later(moment: float) -> float:
        """When something of backward comes, with what is computed again before it."""
        return moment + sum(one.block.seconds for one in again if one.begins_at <= moment)

    recomputed = {number: one for one in again for number in one.numbers}
    inputs = {one.block.first: one for one in again}
    made, remade = [], []
    for number, life in enumerate(profile.tensors):
        if number in inputs:
            one = inputs[number]
            kept_for = later(one.begins_at) - one.block.seconds
            made.append(
                TensorLife(
                    f"{one.block.name} input",
                    one.block.input_bytes,
                    (one.block.begins_at, max(one.block.begins_at, kept_for)),
                )
            )
        if number in recomputed:
            one = recomputed[number]
            begin = later(one.begins_at) - one.block.seconds
            end = later(life.uses[-1])
            at = min(end, begin + life.uses[0] - one.block.begins_at)
            remade.append(replace(life, uses=(at, end), cyclic=False, held_until=end))
        else:
            uses = (life.uses[0], *map(later, life.uses[1:]))
            held = life.held_until
            made.append(replace(life, uses=uses, held_until=later(held) if held else 0.0))
    return replace(
        profile,
        step_seconds=later(profile.step_seconds),
        tensors=(*made, *remade),
        others=_others(profile, again, later),
        blocks=(),
        updates=tuple(replace(one, ready_at=later(one.ready_at)) for one in profile.updates),
    )


class _Recomputed:
    """A block that is computed again."""

    def __init__(self, block: Block, profile: Profile) -> None:
        self.block = block
        self.numbers = range(block.first, block.end)
        #: When backward first needs one of its tensors, as the step is now.
        self.begins_at = min(profile.tensors[number].uses[-1] for number in self.numbers)


def _others(
    profile: Profile, again: Sequence[_Recomputed], later: Callable[[float], float]
) -> tuple[tuple[float, int], ...]:
    """What else there is: what a block needs beside its tensors, it needs again."""
    found = [(later(moment), nbytes) for moment, nbytes in profile.others]
    for one in again if found else ():
        begin = later(one.begins_at) - one.block.seconds
        needed = [
            nbytes for at, nbytes in profile.others
            if one.block.begins_at <= at < one.block.ends_at
        ]  # fmt: skip
        before = [nbytes for at, nbytes in profile.others if at < one.begins_at]
        found.append((begin, max(before[-1], max(needed, default=0))))
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _mix(profile: Profile, limit: int, names: Sequence[str]) -> Mix:
    changed = with_recomputed(profile, names)
    plan = plan_lifetimes(changed, limit)
    return Mix(tuple(names), changed, plan, replay(changed, plan))


def _candidates(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Sets of blocks, of each order some beginnings."""
    seen: set[tuple[str, ...]] = set()
    for order in _orders(profile):
        parts = min(_MIXES, len(order))
        for part in range(1, parts + 1):
            chosen = set(order[: round(part * len(order) / parts)])
            names = tuple(block.name for block in profile.blocks if block.name in chosen)
            if names not in seen:
                seen.add(names)
                yield names


def _orders(profile: Profile) -> Iterator[list[str]]:
    """Which blocks to compute again first."""
    tensors = profile.tensors

    def cost(block: Block) -> float:
        """Seconds for a byte that need not be in memory."""
        saved = sum(life.nbytes for life in tensors[block.first : block.end])
        # Blocks that are alike do not take the same time to the last digit.
        return float(f"{block.seconds / max(1, saved - block.input_bytes):.1g}")

    worth = [
        block for block in profile.blocks
        if sum(life.nbytes for life in tensors[block.first : block.end]) > block.input_bytes
    ]  # fmt: skip
    # Of those that cost the same, what lies for a short time is hard to move; or what lies longest
    # takes most off the peak.
    yield [block.name for block in sorted(worth, key=lambda one: (cost(one), -one.first))]
    yield [block.name for block in sorted(worth, key=lambda one: (cost(one), one.first))]


def _is_better(mix: Mix, best: Mix) -> bool:
    if mix.plan.fits != best.plan.fits:
        return mix.plan.fits
    if not mix.plan.fits and mix.plan.peak_bytes != best.plan.peak_bytes:
        return mix.plan.peak_bytes < best.plan.peak_bytes
    least = _WORTH if len(mix.recomputed) > len(best.recomputed) else 0.0
    return mix.replay.step_seconds < (1 - least) * best.replay.step_seconds
