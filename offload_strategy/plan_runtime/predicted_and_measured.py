"""Predictions of a step: compared with its measurement, and with one thing different.

[Note: parts of a step]
Training computes the model, updates the optimizer if that runs on the same thread, and waits: for
reads, for memory that writes must free, for states and writes of the optimizer. The parts add up to
the step, in a replay as in a run. In a run, everything except updates and waiting counts as
computing, including data loading and logging, which a replay does not know. Of streamed weights
nothing is predicted, and the peak is measured only if memory is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from pydantic import FiniteFloat

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, plan_all, plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.units import format_size, markdown_table

Unit = Literal["s", "B", "B/s"]

PEAK = "peak of memory"
_LEAST_GAIN = 0.01  # by which a change must shorten a step
#: What is compared of a step, in this order; see [Note: parts of a step].
_UNITS: dict[str, Unit] = {
    "step": "s",
    "computing": "s",
    "updates": "s",
    "waiting for reads": "s",
    "waiting for room": "s",
    "waiting for updates": "s",
    "waiting for weights": "s",
    "read in a step": "B",
    "written in a step": "B",
    PEAK: "B",
}
StepFigures = Mapping[str, float]
"""Seconds and bytes of one step by part, those of `_UNITS` that were predicted or measured."""


def _figures_of(profile: Profile, plan: LifetimePlan) -> dict[str, float]:
    """Return the figures of a replay, with the seconds of updates on the training cores."""
    found = replay(profile, plan)
    updating = sum(each.seconds for each in profile.updates) if profile.shared_cores else 0.0
    stalls, lanes = found.stalls, found.lanes.items()
    read, written = (
        float(sum(use.nbytes for lane, use in lanes if lane.endswith(verb)))
        for verb in (" read", " write")
    )
    rest = 0.0
    if profile.updates:  # without any, what is left is the rounding of these sums
        rest = max(0.0, found.step_seconds - found.computing_seconds - sum(stalls.values()))
    # Updates also compute while training waits for them; a run does not count that as waiting.
    within = min(max(0.0, updating - rest), stalls["updates"])
    return {
        "step": found.step_seconds,
        "computing": found.computing_seconds,
        "updates": rest + within,
        "waiting for reads": stalls["reads"],
        "waiting for room": stalls["memory"],
        "waiting for updates": stalls["updates"] - within,
        "read in a step": read,
        "written in a step": written,
        PEAK: found.peak_bytes,
    }


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One row of a comparison in seconds, bytes, or bytes per second."""

    part: str
    predicted: FiniteFloat | None  # None if it was not predicted
    observed: FiniteFloat | None  # None if it was not measured
    unit: Unit
    remark: str = ""  # For people

    @property
    def ratio(self) -> float | None:
        """Observed divided by predicted; 1 if both are 0, None if only the prediction is."""
        if self.predicted is None or self.observed is None:
            return None
        if self.predicted < 1e-9:  # what rounding leaves of 0
            return 1.0 if not self.observed else None
        return self.observed / self.predicted


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """Predicted and measured figures of a step; `str` gives a Markdown table."""

    parts: tuple[ComparedFigure, ...]  # Rows for the step and for the paths
    remarks: tuple[str, ...] = ()  # What to know about these figures

    def part(self, name: str) -> ComparedFigure:
        """Return the row with this name; raise a KeyError if there is none."""
        return {part.part: part for part in self.parts}[name]

    def __str__(self) -> str:
        rows = []
        for part in self.parts:
            values = (_text(value, part.unit) for value in (part.predicted, part.observed))
            ratio = "" if part.ratio is None else f"{part.ratio:.2f}"
            rows.append((part.part, *values, ratio, part.remark))
        table = markdown_table("part | predicted | observed | ratio |", rows)
        remarks = "\n".join(f"- {remark}" for remark in self.remarks)
        return f"{table}\n\n{remarks}" if remarks else table


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A step of some passes, predicted by a replay of its last pass on the path of the profile."""

    profile: Profile
    leaving: Iterable[int] = ()  # Numbers of the tensors that are offloaded without a limit
    limit: int | None = None  # Bytes for which a plan decides what is offloaded
    passes: int = 1

    @property
    def plan(self) -> LifetimePlan:
        """The moves of a pass."""
        if self.limit is None:
            return plan_all(self.profile, self.leaving)
        return plan_lifetimes(self.profile, self.limit)

    def figures(self) -> dict[str, float]:
        """Replay the step; of several passes, updates belong to the last."""
        plan, more = self.plan, self.passes - 1
        last = _figures_of(self.profile, plan)
        before = _figures_of(replace(self.profile, updates=()), plan) if more else last
        peak = max(last[PEAK], before[PEAK])
        return {part: figure + more * before[part] for part, figure in last.items()} | {PEAK: peak}


def compare_prediction(
    predicted: StepFigures,
    observed: StepFigures,
    paths: Iterable[ComparedFigure] = (),
    remarks: Iterable[str] = (),
) -> PredictionComparison:
    """Compare the figures of a step; rows for each direction of each path follow."""
    parts = (
        ComparedFigure(part, predicted.get(part), observed[part], unit)
        for part, unit in _UNITS.items()
        if part in observed
    )
    return PredictionComparison((*parts, *paths), tuple(remarks))


def _text(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    if unit == "s":
        return f"{value:.3f} s"
    return format_size(round(value)) if unit == "B" else f"{value / 1e9:.3g} GB/s"


# ---------------------------------------------------------------------- what if
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
