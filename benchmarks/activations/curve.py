"""The recompute-offload-keep curve (SSDTrain, section IV): throughput over activation peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.activations.contenders import (
    CONTENDERS,
    FILES,
    KEEP,
    OFFLOAD_DISK,
    OFFLOAD_HOST,
    RECOMPUTE,
)
from benchmarks.activations.models import MODELS, SEQUENCE
from benchmarks.activations.session import Rows, run
from benchmarks.io.results import Result
from benchmarks.machine import cores, say
from offload_strategy.units import MiB

#: Throughput that offload must reach, as a share of keep's.
_THROUGHPUT = 0.95
#: Activation peak that it may reach, as a share of keep's: at the smallest batch, at the largest.
_PEAK_SMALLEST, _PEAK_LARGEST = 0.45, 0.35


@dataclass(frozen=True)
class Point:
    """One contender at one batch size."""

    model: str
    batch: int
    contender: str
    tokens_per_second: float
    throughput: float
    peak_bytes: float
    peak_share: float
    written_bytes: float
    read_bytes: float
    hidden_share: float | None


def curve(
    directory: Path, batches: Sequence[int], repeats: int, *, small: bool = False
) -> tuple[list[Point], list[Result]]:
    """Train every model at every batch size in every way.

    Args:
        directory: on the disk.
        batches: sizes.
        repeats: steps that count.
        small: tiny models.
    """
    points: list[Point] = []
    results: list[Result] = []
    for model in MODELS:
        for batch in batches:
            say(f"{model}, batch {batch}")
            options = {"model": model, "batch": batch, "threads": cores(), "small": small}
            rows = run(
                {kind: {**options, "contender": kind} for kind in CONTENDERS}, repeats, directory
            )
            if len(set().union(*(row.bits for row in rows.values()))) != 1:
                raise RuntimeError(f"{model}, batch {batch}: contenders differ in losses or bits")
            points += [_point(model, batch, rows[kind], rows[KEEP]) for kind in CONTENDERS]
            results += _claims(model, batch, rows, batches)
            say("\n" + markdown(points[-len(CONTENDERS) :]))
    return points, results


def _point(model: str, batch: int, rows: Rows, keep: Rows) -> Point:
    return Point(
        model=model,
        batch=batch,
        contender=rows.name,
        tokens_per_second=batch * SEQUENCE / rows.median("seconds"),
        throughput=keep.ratio(rows, "seconds"),
        peak_bytes=rows.median("peak_bytes"),
        peak_share=rows.ratio(keep, "peak_bytes"),
        written_bytes=rows.moved("written"),
        read_bytes=rows.moved("read"),
        hidden_share=rows.steps[-1].get("hidden_share") if rows.moved("written") else None,
    )


def _claims(model: str, batch: int, rows: dict[str, Rows], batches: Sequence[int]) -> list[Result]:
    offload, keep, recompute = rows[OFFLOAD_DISK], rows[KEEP], rows[RECOMPUTE]
    where = f"{model}, batch {batch}"
    most = {min(batches): _PEAK_SMALLEST, max(batches): _PEAK_LARGEST}.get(batch, _PEAK_SMALLEST)

    def speed(row: Rows) -> float:
        return batch * SEQUENCE / row.median("seconds")

    def peak(row: Rows) -> float:
        return row.median("peak_bytes") / MiB

    return [
        Result(
            f"{where}: tokens/s beside keep", speed(offload), speed(keep), "tokens/s",
            keep.ratio(offload, "seconds"), _THROUGHPUT,
        ),
        Result(
            f"{where}: activation peak beside keep", peak(offload), peak(keep), "MiB",
            offload.ratio(keep, "peak_bytes"), most, at_least=False,
        ),
        Result(
            f"{where}: tokens/s beside recompute", speed(offload), speed(recompute), "tokens/s",
            recompute.ratio(offload, "seconds"), 1.0,
        ),
        Result(
            f"{where}: activation peak beside recompute", peak(offload), peak(recompute), "MiB",
            offload.ratio(recompute, "peak_bytes"), 1.0, at_least=False,
        ),
    ]  # fmt: skip


def markdown(points: Sequence[Point]) -> str:
    """The points as a table."""
    lines = [
        "| model | batch | | tokens/s | of keep | activation peak, MiB | of keep "
        "| written, MB | read, MB | hidden |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in points:
        hidden = "" if p.hidden_share is None else f"{p.hidden_share:.1%}"
        lines.append(
            f"| {p.model} | {p.batch} | {p.contender} | {p.tokens_per_second:.0f} "
            f"| {p.throughput:.3f} | {p.peak_bytes / MiB:.0f} | {p.peak_share:.3f} "
            f"| {p.written_bytes / 1e6:.0f} | {p.read_bytes / 1e6:.0f} | {hidden} |"
        )
    return "\n".join(lines)


_STYLE: dict[str, dict[str, Any]] = {
    KEEP: {"marker": "s", "color": "#555555"},
    RECOMPUTE: {"marker": "^", "color": "#d08000"},
    OFFLOAD_DISK: {"marker": "o", "color": "#0060c0"},
    OFFLOAD_HOST: {"marker": "x", "color": "#60a0d0"},
    FILES: {"marker": "v", "color": "#b03030"},
}


def plot(points: Sequence[Point], file: Path) -> None:
    """Save the curve as a picture: up is faster, left is smaller."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(point.model for point in points))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5.5 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for kind in CONTENDERS:
            chosen = [p for p in points if p.model == model and p.contender == kind]
            axis.plot(
                [p.peak_bytes / MiB for p in chosen],
                [p.tokens_per_second for p in chosen],
                label=kind,
                linewidth=1,
                **_STYLE[kind],
            )
            for p in chosen:
                axis.annotate(
                    str(p.batch), (p.peak_bytes / MiB, p.tokens_per_second),
                    textcoords="offset points", xytext=(5, 4), fontsize=7,
                )  # fmt: skip
        axis.set(title=model, xlabel="activation peak, MiB", ylabel="tokens per second")
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
