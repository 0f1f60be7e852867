"""A comparison of the prediction of a step with its measurement, figure by figure.

[Note: parts of a step]
Training computes the model, updates the optimizer if that runs on the same thread, and waits: for
reads, for memory that writes must free, for states and writes of the optimizer. The parts add up to
the step, in a replay as in a run. In a run, everything except updates and waiting counts as
computing, including data loading and logging, which a replay does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from offload_strategy.plan_runtime.booked_path import BookedPath
from offload_strategy.plan_runtime.json_files import load_json, save_json
from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, PlannedMove, plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.plan_runtime.replay_lanes import StepReplay
from offload_strategy.units import format_size

Unit = Literal["s", "B", "B/s"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step, predicted or measured; see [Note: parts of a step].

    Args:
        step_seconds: Seconds of the step.
        computing_seconds: Seconds in which neither updates ran nor training waited.
        update_seconds: Seconds of updates on the training thread, without waiting.
        read_wait_seconds: Seconds of waiting for saved tensors.
        room_wait_seconds: Seconds of waiting for writes because memory or buffers were used up.
        update_wait_seconds: Seconds of waiting for states of the optimizer.
        read_bytes: Bytes that were read from paths.
        written_bytes: Bytes that were written to paths.
        peak_bytes: Peak memory; None if it is not known.
        other_wait_seconds: Seconds of waiting for streamed weights, which a replay does not know.
    """

    step_seconds: float
    computing_seconds: float
    update_seconds: float
    read_wait_seconds: float
    room_wait_seconds: float
    update_wait_seconds: float
    read_bytes: float
    written_bytes: float
    peak_bytes: int | None = None
    other_wait_seconds: float = 0.0

    @classmethod
    def of(
        cls, found: StepReplay, *, paths: Sequence[PathRates], updating: float = 0.0
    ) -> StepFigures:
        """Return the figures of a replay.

        Args:
            found: The replay.
            paths: Its paths, whose names identify the lanes.
            updating: Seconds of updates on the cores that train.
        """
        stalls = {
            reason: found.stalls.get(reason, 0.0) for reason in ("reads", "memory", "updates")
        }
        moved = {
            verb: float(
                sum(
                    found.lanes[lane].nbytes
                    for path in paths
                    if (lane := f"{path.name} {verb}") in found.lanes
                )
            )
            for verb in ("read", "write")
        }
        rest = max(0.0, found.step_seconds - found.computing_seconds - sum(stalls.values()))
        # Updates also compute while training waits for them; a run does not count that as waiting.
        within = min(max(0.0, updating - rest), stalls["updates"])
        return cls(
            found.step_seconds,
            found.computing_seconds,
            rest + within,
            stalls["reads"],
            stalls["memory"],
            stalls["updates"] - within,
            moved["read"],
            moved["write"],
            found.peak_bytes,
        )

    def __add__(self, other: StepFigures) -> StepFigures:
        """Add up two consecutive passes of a step."""
        values = {
            one.name: getattr(self, one.name) + getattr(other, one.name)
            for one in fields(self)
            if one.name != "peak_bytes"
        }
        peaks = (self.peak_bytes, other.peak_bytes)
        known = [peak for peak in peaks if peak is not None]
        return StepFigures(**values, peak_bytes=max(known) if len(known) == len(peaks) else None)


@dataclass(frozen=True, slots=True)
class PathComparison:
    """One direction of a path.

    Args:
        name: The path and the direction.
        predicted: Bytes per second as known before the run; None if unknown.
        observed: Bytes per second while its queue was never empty; None if that was too rare.
        remark: Where the figures come from.
    """

    name: str
    predicted: float | None
    observed: float | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One row of a comparison.

    Args:
        part: Name of the row.
        predicted: Figure predicted before the run; None if nothing was predicted.
        observed: Measured figure; None if it was not measured.
        unit: Unit of both: seconds, bytes, or bytes per second.
        remark: Note for people.

    Raises:
        ValueError: If a figure is not finite.
    """

    part: str
    predicted: float | None
    observed: float | None
    unit: Unit
    remark: str = ""

    def __post_init__(self) -> None:
        for value in (self.predicted, self.observed):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{self.part}: {value} is no figure")

    @property
    def ratio(self) -> float | None:
        """Observed divided by predicted; 1 if both are 0, None if only the prediction is."""
        if self.predicted is None or self.observed is None:
            return None
        if not self.predicted:
            return 1.0 if not self.observed else None
        return self.observed / self.predicted


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """Predicted and measured figures of a step; `str` gives a Markdown table.

    Args:
        parts: Rows for the step and for the paths.
        remarks: What to know about these figures.
        about: The steps that were measured and other facts, for people.
    """

    parts: tuple[ComparedFigure, ...]
    remarks: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> ComparedFigure:
        """Return the row with this name.

        Raises:
            KeyError: If there is none.
        """
        for part in self.parts:
            if part.part == name:
                return part
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Return rows with ratios, in seconds, bytes, and bytes per second, ready for JSON."""
        return {
            "parts": [asdict(part) | {"ratio": part.ratio} for part in self.parts],
            "remarks": list(self.remarks),
            "about": dict(self.about),
        }

    def save(self, file: Path) -> None:
        """Write the comparison as JSON, for ``ssd-offload report``.

        Raises:
            ConfigError: If the file cannot be written.
        """
        save_json(file, self.as_dict())

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: If the file is something else.
        """
        how = "Write one with engine.compare_prediction().save(Path(...))."
        return load_json(file, cls, "a comparison with a prediction", how)

    def __str__(self) -> str:
        """A table in Markdown."""
        rows = ["| part | predicted | observed | ratio | |", "|---|---|---|---|---|"]
        for part in self.parts:
            ratio = "" if part.ratio is None else f"{part.ratio:.2f}"
            rows.append(
                f"| {part.part} | {_text(part.predicted, part.unit)} "
                f"| {_text(part.observed, part.unit)} | {ratio} | {part.remark} |"
            )
        if self.remarks:
            rows += ["", *(f"- {remark}" for remark in self.remarks)]
        return "\n".join(rows)


def predict_figures(
    profile: Profile,
    *,
    leaving: Iterable[int] = (),
    limit: int | None = None,
    passes: int = 1,
) -> StepFigures:
    """Predict a step of training by a replay on the paths of a profile.

    Args:
        profile: Profile of the last pass, with updates and the rates of the paths.
        leaving: Numbers of the tensors that are offloaded; without effect if a limit is given.
        limit: Bytes of memory for which a plan decides what is offloaded.
        passes: Forward and backward passes of a step; updates belong to the last.
    """
    if limit is None:
        plan = _all_of(profile, leaving)
        room = None
    else:
        plan, room = plan_lifetimes(profile, limit), limit

    def of(one: Profile) -> StepFigures:
        most = one.peak_bytes + one.tensors_bytes if room is None else room
        updating = sum(update.seconds for update in one.updates) if one.shared_cores else 0.0
        return StepFigures.of(replay(one, plan, limit=most), paths=one.paths, updating=updating)

    whole = of(profile)
    if passes > 1:
        before = of(replace(profile, updates=()))
        for _ in range(passes - 1):
            whole = before + whole
    return whole


def compare_prediction(
    profile: Profile,
    predicted: StepFigures,
    observed: StepFigures,
    paths: Iterable[PathComparison] = (),
    *,
    remarks: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
) -> PredictionComparison:
    """Compare predicted and measured figures of a step.

    Args:
        profile: Profile of the step.
        predicted: Predicted figures.
        observed: Measured figures.
        paths: Each direction of each path.
        remarks: What to know about these figures.
        about: Further facts, for people.
    """
    seconds = {
        "step": "step_seconds",
        "computing": "computing_seconds",
        "updates": "update_seconds",
        "waiting for reads": "read_wait_seconds",
        "waiting for room": "room_wait_seconds",
        "waiting for updates": "update_wait_seconds",
    }
    parts = [
        ComparedFigure(name, getattr(predicted, figure), getattr(observed, figure), "s")
        for name, figure in seconds.items()
    ]
    if observed.other_wait_seconds:
        parts.append(ComparedFigure("waiting for weights", None, observed.other_wait_seconds, "s"))
    parts += [
        ComparedFigure("read in a step", predicted.read_bytes, observed.read_bytes, "B"),
        ComparedFigure("written in a step", predicted.written_bytes, observed.written_bytes, "B"),
    ]
    if observed.peak_bytes is not None:
        parts.append(
            ComparedFigure("peak of memory", predicted.peak_bytes, observed.peak_bytes, "B")
        )
    parts += [
        ComparedFigure(one.name, one.predicted, one.observed, "B/s", one.remark) for one in paths
    ]
    known = {"saved_bytes": profile.tensors_bytes, "updates": len(profile.updates)}
    return PredictionComparison(tuple(parts), tuple(remarks), known | dict(about or {}))


def _all_of(profile: Profile, leaving: Iterable[int]) -> LifetimePlan:
    """Return a plan that offloads tensors however much room there is, and reads them just in time.

    Each tensor is offloaded in the idle period before its last use. Reads are in the order of
    need: a read starts earlier if its path has no time left, with backward at the earliest.
    """
    paths = [BookedPath(rates) for rates in profile.paths]
    tensors = profile.tensors
    moves: list[PlannedMove] = []
    chosen = sorted((n for n in set(leaving) if len(tensors[n].uses) > 1 and paths), reverse=True)
    for number in sorted(chosen, key=lambda number: -tensors[number].uses[-1]):
        tensor = tensors[number]
        leaves, needed = tensor.uses[-2:]
        path = min(paths, key=lambda path: path.reads.busy_seconds)
        fetch = path.reads.before(needed, path.read_seconds(tensor.nbytes))
        path.reads.book(fetch, needed)
        moves.append(
            PlannedMove(
                tensor=number,
                period=len(tensor.uses) - 2,
                name=tensor.name,
                nbytes=tensor.nbytes,
                place=path.rates.name,
                leaves_at=leaves,
                gone_at=leaves,
                fetch_at=min(needed, max(fetch, leaves, profile.forward_seconds)),
                needed_at=needed,
            )
        )
    peak = profile.peak_bytes
    return LifetimePlan(limit=peak, peak_bytes=peak, unplanned_bytes=peak, moves=tuple(moves))


def _text(value: float | None, unit: Unit) -> str:
    if value is None:
        return ""
    if unit == "s":
        return f"{value:.3f} s"
    if unit == "B":
        return format_size(round(value))
    return f"{value / 1e9:.3g} GB/s"
