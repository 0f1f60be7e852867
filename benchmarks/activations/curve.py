"""The recompute-offload-keep curve (SSDTrain, section IV): throughput over activation peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from benchmarks.activations.session import Rows, Setting, run
from benchmarks.io.results import Result
from benchmarks.machine import say
from offload_strategy.units import MiB

#: Throughput that offload must reach, as a share of keep's.
_THROUGHPUT = 0.95
#: Activation peak that it may reach, as a share of keep's: at the smallest batch, at the largest.
_PEAK_SMALLEST, _PEAK_LARGEST = 0.45, 0.35


#: Which are to be told apart by a few percent.
_CLOSE = (KEEP, OFFLOAD_DISK)

#: Of the place's name, the batch, the rows by contender, and all batches.
Claims = Callable[[str, int, dict[str, Rows], Sequence[int]], list[Result]]


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
    directory: Path,
    batches: Sequence[int],
    repeats: int,
    setting: Setting,
    *,
    models: Sequence[str] = ("GPT", "BERT"),
    contenders: Sequence[str] = CONTENDERS,
    processes: int = 1,
    claims: Claims | None = None,
) -> tuple[list[Point], list[Result]]:
    """Train every model at every batch size in every way.

    Args:
        directory: on the disk.
        batches: sizes.
        repeats: steps that count.
        setting: what all have in common.
        models: of `models.MODELS`.
        contenders: of `contenders.CONTENDERS`.
        processes: one after the other, of those that differ by a few percent.
        claims: what must hold at a point: of the model, the batch, the rows by contender and the
            batches; None for what must hold on the CPU.
    """
    points: list[Point] = []
    results: list[Result] = []
    for model in models:
        for batch in batches:
            say(f"{model}, batch {batch}")
            options = setting.options(model, batch)
            rows = run(
                {kind: {**options, "contender": kind} for kind in contenders},
                repeats,
                directory,
                again=_CLOSE,
                processes=processes,
            )
            odd = [kind for kind in contenders if not rows[kind].agrees(rows[KEEP])]
            if odd == [RECOMPUTE]:
                # Of a tensor that several blocks use, it adds up the gradients in another order.
                say(f"{model}, batch {batch}: gradients of recompute differ from keep's in bits")
            elif odd:
                raise RuntimeError(
                    f"{model}, batch {batch}: {odd} differ from keep in losses or bits"
                )
            tokens = batch * setting.shape.sequence
            points += [_point(model, batch, tokens, rows[kind], rows[KEEP]) for kind in contenders]
            results += (claims or on_the_host)(f"{model}, batch {batch}", batch, rows, batches)
            say("\n" + markdown(points[-len(contenders) :]))
    return points, results


def _point(model: str, batch: int, tokens: int, rows: Rows, keep: Rows) -> Point:
    return Point(
        model=model,
        batch=batch,
        contender=rows.name,
        tokens_per_second=tokens / rows.median("seconds"),
        throughput=keep.ratio(rows, "seconds"),
        peak_bytes=rows.median("peak_bytes"),
        peak_share=rows.ratio(keep, "peak_bytes"),
        written_bytes=rows.moved("written"),
        read_bytes=rows.moved("read"),
        hidden_share=rows.steps[-1].get("hidden_share") if rows.moved("written") else None,
    )


def on_the_host(
    where: str, batch: int, rows: dict[str, Rows], batches: Sequence[int]
) -> list[Result]:
    """What must hold where all cores compute: nearly keep's speed, and better than recompute."""
    offload, keep, recompute = rows[OFFLOAD_DISK], rows[KEEP], rows[RECOMPUTE]
    most = {min(batches): _PEAK_SMALLEST, max(batches): _PEAK_LARGEST}.get(batch, _PEAK_SMALLEST)
    return [
        compare(f"{where}: speed relative to keep", "seconds", offload, keep, _THROUGHPUT),
        compare(f"{where}: activation peak relative to keep", "peak_bytes", offload, keep, most),
        compare(f"{where}: speed relative to recompute", "seconds", offload, recompute, 1.0),
        compare(
            f"{where}: activation peak relative to recompute", "peak_bytes", offload, recompute, 1.0
        ),
    ]


def compare(name: str, key: str, ours: Rows, peer: Rows, threshold: float) -> Result:
    """A claim about speed (`seconds`, as steps per second) or about memory (`peak_bytes`)."""
    if key == "seconds":
        rates = 1 / ours.median(key), 1 / peer.median(key)
        return Result(name, *rates, "steps/s", peer.ratio(ours, key), threshold)
    peaks = ours.median(key) / MiB, peer.median(key) / MiB
    return Result(name, *peaks, "MiB", ours.ratio(peer, key), threshold, at_least=False)


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
            if not chosen:
                continue
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
