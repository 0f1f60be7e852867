"""What a step would take if one thing were different: other paths, more memory, a faster device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from offload_strategy.plan_runtime.predicted_and_measured import PredictedStep
from offload_strategy.plan_runtime.profile import PathRates
from offload_strategy.units import format_size

_LEAST_GAIN = 0.01  # by which a change must shorten a step


class Change(NamedTuple):
    """A change, and the seconds of a step as predicted without it and with it."""

    what: str
    before_seconds: float
    after_seconds: float


def best_changes(step: PredictedStep) -> list[Change]:
    """Replay a step with one change at a time; return those that shorten it, the best first."""
    before = step.figures()["step"]
    after = [(what, share * other.figures()["step"]) for what, other, share in _changes(step)]
    worth = [Change(what, before, to) for what, to in after if to < before * (1 - _LEAST_GAIN)]
    return sorted(worth, key=lambda change: change.after_seconds)


def _changes(step: PredictedStep) -> Iterator[tuple[str, PredictedStep, float]]:
    """Yield changes with their steps, and the share of these whose time counts."""
    profile, moved = step.profile, step.plan.moved_bytes
    states = sum(update.read_bytes for update in profile.updates)
    if moved or states:
        what = "paths that read and write twice as fast, or twice as many of them"
        yield what, _with_paths(step, 2.0), 1.0
    # The same as paths of half the speed, in half the time.
    yield "a device that computes twice as fast", _with_paths(step, 0.5), 0.5
    if kept := moved // 4:
        # What is saved last has the least time to leave and to come back.
        numbers = tuple(step.leaving)
        sums = accumulate(profile.tensors[number].nbytes for number in numbers)
        fewer = [one for one, nbytes in zip(numbers, sums, strict=True) if nbytes <= moved - kept]
        changed = replace(step, leaving=fewer, limit=step.limit and step.limit + kept)
        yield f"{format_size(kept)} more memory, so that a quarter less leaves", changed, 1.0
    if states:
        here = [replace(update, read_bytes=0, written_bytes=0) for update in profile.updates]
        changed = replace(step, profile=replace(profile, updates=tuple(here)))
        yield f"a dram tier of {format_size(states)} for optimizer states", changed, 1.0
    if profile.updates:
        what = "twice the micro-batches per step, for as many samples (this trains differently)"
        yield what, replace(step, passes=2 * step.passes), 0.5


def _with_paths(step: PredictedStep, factor: float) -> PredictedStep:
    paths = (PathRates(p.name, factor * p.read, factor * p.write) for p in step.profile.paths)
    return replace(step, profile=replace(step.profile, paths=tuple(paths)))
