"""The report of a run: its metrics, its last step over time, and what would shorten that.

It can be saved as JSON, and shown as one HTML page, which draws its charts from the same JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import NamedTuple, Self

from offload_strategy.activations.forward_records import Trace
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.predicted_and_measured import (
    Change,
    ComparedFigure,
    PredictionComparison,
)
from offload_strategy.plan_runtime.profile import load_json, save_json
from offload_strategy.telemetry import Recorder, json_for_others
from offload_strategy.units import markdown_list

_FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 90vh; border: 0"></iframe>'


class Span(NamedTuple):
    """What a lane did for a time, in seconds from the start of the pass, and the bytes it moved.

    The lanes `forward` and `backward` have moments in which a tensor of this name is saved and
    used, with the bytes that are in memory then.
    """

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class RunReport:
    """What `OffloadEngine.report` returns; a notebook shows it as a page, `str` gives a text."""

    metrics: Mapping[str, float]  # Of the run so far, the finite ones
    config: str  # YAML, with what was decided automatically
    paths: tuple[ComparedFigure, ...]  # Bytes per second known before the run, and seen in it
    timeline: tuple[Span, ...] = ()  # The last pass, and what follows it until the next one
    # Predicted over the pass as (seconds, bytes from then on), with and without offload
    memory: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    comparison: PredictionComparison | None = None
    changes: tuple[Change, ...] = ()  # The best first
    about: str = ""  # Date and machine, for people

    def save(self, file: Path) -> None:
        """Write the report as JSON, for ``ssd-offload report``; ConfigError if that fails."""
        save_json(file, asdict(self))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote; raise a ConfigError if the file is something else."""
        how = "Write one with engine.report().save(Path(...)), or `report: FILE` in the config."
        return load_json(file, cls, "the report of a run", how)

    def page(self) -> str:
        """Return the page, which needs no network; raise a ConfigError if Plotly is missing."""
        try:
            from plotly.offline import get_plotlyjs
        except ImportError:
            raise ConfigError(
                "the page of a report is drawn by Plotly, which is not installed: "
                "pip install 'offload-strategy[report]'"
            ) from None
        template = resources.files(__package__).joinpath("run_report.html").read_text("utf-8")
        # No text of the run may end the script that it is part of.
        run = json_for_others(asdict(self)).replace("</", "<\\/")
        return template.replace("__PLOTLY__", get_plotlyjs()).replace("__RUN__", run)

    def _repr_html_(self) -> str:
        return _FRAME.format(escape(self.page()))

    def __str__(self) -> str:
        """The comparison with the prediction, and the changes that would help most, in Markdown."""
        lines = [
            f"{change.what}: {change.after_seconds:.3f} s instead of {change.before_seconds:.3f} s"
            for change in self.changes[:3]
        ]
        changes = markdown_list("What would shorten the step, as predicted", lines or ["nothing"])
        return f"{self.comparison or 'Too few steps to compare with a prediction.'}\n\n{changes}"


def timeline(
    trace: Trace,
    names: Sequence[str],
    ended_at: float,
    others: Sequence[tuple[float, int]],
    recorder: Recorder,
) -> tuple[Span, ...]:
    """Return what happened in a pass and until the next one; transfers are those requested then.

    `others` is the baseline memory of its profile, which is that after each of the same events.
    """
    saves = zip(trace.saved_at, names, trace.memory_saved, strict=False)
    uses = zip(trace.uses, trace.memory_used, strict=False)
    spans = [Span("forward", name, at, at, nbytes) for at, name, nbytes in saves]
    spans += [Span("backward", names[number], at, at, nbytes) for (number, at, _), nbytes in uses]
    spans.sort(key=lambda span: span.begin)
    for place, (_, level) in enumerate(others[1 : len(spans) + 1]):
        spans[place] = spans[place]._replace(nbytes=spans[place].nbytes + level)
    start, moves = trace.started_at, recorder.moves.copy()
    updates = [one for one in recorder.updates.copy() if one.begin >= start]
    # It is estimated by the step before, and this one may have taken longer.
    ended_at = max([ended_at, *(one.end for one in updates)])
    spans.append(Span("end", "of the step", ended_at, ended_at))
    spans += [
        Span("updates", "optimizer", one.begin, one.end, one.read_bytes + one.written_bytes)
        for one in updates
    ]
    spans += [Span("waits", *stall) for stall in recorder.stalls.copy() if stall.started_at > start]
    spans += [
        Span(f"{move.tier} {move.direction}", move.client, *move[-2:], move.nbytes)
        for move in moves
        if start <= move.queued_at < ended_at
    ]
    return tuple(one._replace(begin=one.begin - start, end=one.end - start) for one in spans)
