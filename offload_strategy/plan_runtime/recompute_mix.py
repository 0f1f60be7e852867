"""The choice between keeping, offloading and recomputing tensors of a step that does not fit.

[Note: one cost]
An offloaded tensor costs the time for which training waits for a path, which is nothing if the path
keeps pace. A recomputed block costs its time in any case, and no path. So nothing is recomputed as
long as computation hides all moves. Otherwise blocks are recomputed, first those that take the
least time for each byte that need not be offloaded (Fuyou, section 4.5, in reverse: what saves the
most computation for a byte is swapped first), and the rest is planned by lifetimes. The number of
blocks follows from a replay of each mix: the mix with the shortest step is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, plan_lifetimes
from offload_strategy.plan_runtime.profile import Block, Profile, TensorLife
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.plan_runtime.replay_lanes import StepReplay

#: Largest number of mixes that are replayed for each order of blocks.
_MIXES = 8
#: Share of the step by which a mix must be faster to justify more recomputation.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class RecomputeMix:
    """A mix of recomputation and offload for a step.

    Args:
        recomputed: Names of the blocks that are recomputed.
        profile: Profile of the step with this recomputation.
        plan: Plan of what is offloaded in it.
        replay: Replay of the plan.
    """

    recomputed: tuple[str, ...]
    profile: Profile
    plan: LifetimePlan
    replay: StepReplay


def choose_mix(profile: Profile, limit: int) -> RecomputeMix:
    """Return the fastest mix that fits, or the smallest if none fits; see [Note: one cost].

    Args:
        profile: Profile of the step, with the blocks that may be recomputed.
        limit: Bytes of memory that the step may require.
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
    """Return the profile of the step with some blocks recomputed in backward.

    The tensors of a block are created again where backward first uses one of them, and are not
    offloaded after that; its inputs exist until then and may be offloaded.

    Args:
        profile: Profile of the step as it is.
        names: Names of the blocks.
    """
    again = sorted(
        (_Recomputed(block, profile) for block in profile.blocks if block.name in names),
        key=lambda one: one.begins_at,
    )
    if not again:
        return profile

    def later(moment: float) -> float:
        """Shift a time by the recomputation before it."""
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
    """A recomputed block."""

    def __init__(self, block: Block, profile: Profile) -> None:
        self.block = block
        self.numbers = range(block.first, block.end)
        #: When backward first uses one of its tensors in the profile.
        self.begins_at = min(profile.tensors[number].uses[-1] for number in self.numbers)


def _others(
    profile: Profile, again: Sequence[_Recomputed], later: Callable[[float], float]
) -> tuple[tuple[float, int], ...]:
    """Return the baseline memory: what a block needs besides its tensors, it needs again."""
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


def _mix(profile: Profile, limit: int, names: Sequence[str]) -> RecomputeMix:
    changed = with_recomputed(profile, names)
    plan = plan_lifetimes(changed, limit)
    return RecomputeMix(tuple(names), changed, plan, replay(changed, plan))


def _candidates(profile: Profile) -> Iterator[tuple[str, ...]]:
    """Yield sets of blocks: prefixes of each order."""
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
    """Yield orders in which blocks could be recomputed."""
    tensors = profile.tensors

    def cost(block: Block) -> float:
        """Return the seconds for each byte that need not be in memory."""
        saved = sum(life.nbytes for life in tensors[block.first : block.end])
        # Equal blocks do not take exactly equal times.
        return float(f"{block.seconds / max(1, saved - block.input_bytes):.1g}")

    worth = [
        block for block in profile.blocks
        if sum(life.nbytes for life in tensors[block.first : block.end]) > block.input_bytes
    ]  # fmt: skip
    # Of equal cost: a short lifetime is hard to hide, a long one reduces the peak most.
    yield [block.name for block in sorted(worth, key=lambda one: (cost(one), -one.first))]
    yield [block.name for block in sorted(worth, key=lambda one: (cost(one), one.first))]


def _is_better(mix: RecomputeMix, best: RecomputeMix) -> bool:
    if mix.plan.fits != best.plan.fits:
        return mix.plan.fits
    if not mix.plan.fits and mix.plan.peak_bytes != best.plan.peak_bytes:
        return mix.plan.peak_bytes < best.plan.peak_bytes
    least = _WORTH if len(mix.recomputed) > len(best.recomputed) else 0.0
    return mix.replay.step_seconds < (1 - least) * best.replay.step_seconds
