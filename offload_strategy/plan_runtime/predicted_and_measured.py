"""Comparing a step's prediction with its measurement, figure by figure.

[Note: parts of a step]
Training computes the model, updates the optimizer where that runs on the same thread, and waits:
for reads, for room that writes must make, for states and writes of the optimizer. The parts add up
to the step, in a replay as in a run. Of a run, all that is no update and no waiting counts as
computing: data loading and logging, too, of which a replay knows nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.booked_path import BookedPath
from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, PlannedMove, plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay import replay
from offload_strategy.plan_runtime.replay_lanes import StepReplay
from offload_strategy.units import format_size

#: Of the file; another one is refused.
FORMAT = 1

Unit = Literal["s", "B", "B/s"]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step, predicted or observed; see [Note: parts of a step].

    Args:
        step_seconds: of it.
        computing_seconds: in which neither updates ran nor training waited.
        update_seconds: of updates on the thread that trains, without waiting.
        read_wait_seconds: for saved tensors.
        room_wait_seconds: for writes, where memory or buffers were used up.
        update_wait_seconds: for states of the optimizer.
        read_bytes: from paths.
        written_bytes: to paths.
        peak_bytes: in memory at most; None if that is not known.
        other_wait_seconds: for what a replay knows nothing of: streamed weights.
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
        """Of a replay.

        Args:
            found: it.
            paths: that it had; their lanes are told by their names.
            updating: seconds of updates that compute where training does.
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
        # While training waits for updates they compute as well, and a run calls that no waiting.
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
        """Of two passes of a step, one after the other."""
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
        name: the path, and the direction.
        predicted: bytes per second as they were known before the run; None if they were not.
        observed: bytes per second while its queue was never empty; None if that was too rare.
        remark: where the figures come from.
    """

    name: str
    predicted: float | None
    observed: float | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A row.

    Args:
        part: what it is about.
        predicted: before the run; None if nothing was predicted.
        observed: None if it was not seen.
        unit: of both: seconds, bytes, or bytes per second.
        remark: for people.
    """

    part: str
    predicted: float | None
    observed: float | None
    unit: Unit
    remark: str = ""

    def __post_init__(self) -> None:
        if self.unit not in ("s", "B", "B/s"):
            raise ValueError(f"{self.part}: no unit {self.unit!r}")
        for value in (self.predicted, self.observed):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{self.part}: {value} is no figure")

    @property
    def ratio(self) -> float | None:
        """Observed by predicted; 1 where both are nothing, None where only the second is."""
        if self.predicted is None or self.observed is None:
            return None
        if not self.predicted:
            return 1.0 if not self.observed else None
        return self.observed / self.predicted


@dataclass(frozen=True, slots=True)
class PredictionComparison:
    """Predicted and measured figures of a step; prints itself as a Markdown table.

    Args:
        parts: of a step, and of the paths.
        remarks: what to know of these figures.
        about: steps that were looked at, and others, for people.
    """

    parts: tuple[ComparedFigure, ...]
    remarks: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> ComparedFigure:
        """The row of a name.

        Raises:
            KeyError: there is none.
        """
        for part in self.parts:
            if part.part == name:
                return part
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: rows with their ratios, in seconds, bytes, and bytes per second."""
        return {
            "parts": [asdict(part) | {"ratio": part.ratio} for part in self.parts],
            "remarks": list(self.remarks),
            "about": dict(self.about),
        }

    def save(self, file: Path) -> None:
        """Write it as JSON, for ``ssd-offload report``."""
        file.write_text(json.dumps({"format": FORMAT, **self.as_dict()}, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            found = json.loads(file.read_text())
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            rows = [{k: v for k, v in row.items() if k != "ratio"} for row in found["parts"]]
            remarks = tuple(str(remark) for remark in found["remarks"])
            return cls(tuple(ComparedFigure(**row) for row in rows), remarks, dict(found["about"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{file} cannot be read as a comparison with a prediction: {error}. Write one with "
                "engine.compare_prediction().save(Path(...))."
            ) from error

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
    """Replay a step of training on the paths of a profile.

    Args:
        profile: of its last pass, updates included, with the rates of the paths.
        leaving: numbers of the tensors that leave whatever the memory; not with a limit.
        limit: bytes of memory by which a plan decides what leaves.
        passes: forward and backward passes of a step; updates come with the last.
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
    """Put what was predicted beside what happened.

    Args:
        profile: of the step.
        predicted: of the step.
        observed: likewise.
        paths: each direction of each path.
        remarks: for people.
        about: likewise.
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
    """A plan by which tensors leave however much room there is, and come back as late as is safe.

    Each leaves in the idle period before its last use, and reads come in the order of need: one
    that is needed when the path has no more time begins earlier, with backward at the earliest.
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
