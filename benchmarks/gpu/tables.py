"""Tables of who trains how fast with how much memory: activations, states, and both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import contenders as who
from benchmarks.gpu.job import BILLION, WIDE, Job, tiny
from benchmarks.gpu.race import Deadline, Outcome, race
from benchmarks.io.results import Result
from benchmarks.machine import say
from benchmarks.turns import Turns
from offload_strategy.units import GiB, MiB

#: What SSDTrain reaches, and more: nobody notices, and 28 to 47 % less.
_THROUGHPUT, _PEAK = 0.99, 0.53
_TO_HOST, _TO_DISK = "ours: activations to the host", "ours: activations to disk"


@dataclass(frozen=True)
class Table:
    """One comparison.

    Args:
        title: for people.
        job: what is trained.
        names: of the contenders, `contenders.PLAIN` first.
        claims: what must hold, of the table's name and the rows.
    """

    title: str
    job: Job
    names: Sequence[str]
    claims: Callable[[str, Mapping[str, Turns]], list[Result]]


def _activation_claims(where: str, rows: Mapping[str, Turns]) -> list[Result]:
    plain = rows[who.PLAIN]
    results = []
    for name in (_TO_HOST, _TO_DISK):
        if name not in rows:
            continue
        ours = rows[name]
        half = plain.median("seconds") / 2
        saved, left = ours.median("saved_bytes"), ours.median("left_bytes")
        results += [
            _faster(f"{where}: {name}: speed beside plain", ours, plain, _THROUGHPUT),
            _smaller(f"{where}: {name}: activation peak beside plain", ours, plain, _PEAK),
            # SSDTrain, section III-D: activation bytes over half of a step, in each direction.
            Result(
                f"{where}: {name}: moved each way, beside what moving all would need",
                left / half / 1e9, saved / half / 1e9, "GB/s", left / saved if saved else 1.0,
                0.0, judged=False,
            ),
        ]  # fmt: skip
    return results


def _state_claims(where: str, rows: Mapping[str, Turns]) -> list[Result]:
    """Faster than each peer that keeps states where we keep them."""
    pairs = {
        "ours: states to disk, commit": (who.ZERO_INFINITY,),
        "ours: states to the host, commit": (
            who.TORCHAO, who.FSDP2, who.ZERO_OFFLOAD, who.SUPER_OFFLOAD,
        ),
    }  # fmt: skip
    return [
        _faster(f"{where}: {ours} beside {peer}", rows[ours], rows[peer], 1.0)
        for ours, peers in pairs.items()
        for peer in peers
        if ours in rows and peer in rows
    ]


def _faster(name: str, ours: Turns, peer: Turns, threshold: float) -> Result:
    rates = 1 / ours.median("seconds"), 1 / peer.median("seconds")
    return Result(name, *rates, "steps/s", rates[0] / rates[1], threshold)


def _smaller(name: str, ours: Turns, peer: Turns, threshold: float) -> Result:
    peaks = ours.median("peak_bytes") / MiB, peer.median("peak_bytes") / MiB
    return Result(name, *peaks, "MiB", peaks[0] / peaks[1], threshold, at_least=False)


_ACTIVATIONS = (who.PLAIN, who.RECOMPUTE, who.SAVE_ON_CPU, who.TRL, _TO_HOST, _TO_DISK)
_STATES = (
    who.PLAIN, who.TORCHAO, who.FSDP2, who.ZERO_OFFLOAD, who.SUPER_OFFLOAD, who.ZERO_INFINITY,
    "ours: states to the host, commit", "ours: states to the host, eager",
    "ours: states to disk, commit", "ours: states to disk, eager",
)  # fmt: skip
_BOTH = (
    who.PLAIN, who.RECOMPUTE, who.ZERO_INFINITY, "ours: states and activations",
    "ours: everything",
)  # fmt: skip

ACTIVATIONS = tuple(
    Table(f"activations, {model}", Job(model, WIDE, 16), _ACTIVATIONS, _activation_claims)
    for model in ("GPT", "BERT", "T5")
)
STATES = (
    Table(
        "optimizer states, GPT",
        Job("GPT", BILLION, 16, updates=True, autocast=True),
        _STATES,
        _state_claims,
    ),
)
BOTH = (
    Table(
        "all of training, GPT",
        Job("GPT", BILLION, 16, updates=True, autocast=True),
        _BOTH,
        lambda where, rows: [],
    ),
)


def run(
    tables: Sequence[Table], directory: Path, seconds: float, *, device: str, quick: bool
) -> tuple[dict[str, str], list[Result], dict[str, Any]]:
    """Fill tables one after the other.

    Args:
        tables: to fill; they share the time equally.
        directory: on the disk.
        seconds: for all.
        device: type of it.
        quick: models of no size; figures mean little.

    Returns:
        Text by title, claims, and all figures.
    """
    texts, results, figures = {}, [], {}
    all_of_it = Deadline(seconds)
    for number, table in enumerate(tables):
        job = replace(tiny(table.job) if quick else table.job, device=device)
        say(f"{table.title}: {job.shape.width} wide, {job.shape.layers} layers, batch {job.batch}")
        deadline = Deadline(all_of_it.left / (len(tables) - number))
        outcome = race(table.names, job, directory, deadline)
        if who.PLAIN not in outcome.rows:
            texts[table.title] = f"plain training did not run: {outcome.skipped}"
            continue
        texts[table.title] = markdown(outcome, job)
        claims = table.claims(table.title, outcome.rows)
        results += [replace(claim, judged=claim.judged and not quick) for claim in claims]
        results += claims_about_bits(table, outcome)
        figures[table.title] = {"job": job.options(), **asdict(outcome)}
        say("\n" + texts[table.title])
    return texts, results, figures


def claims_about_bits(table: Table, outcome: Outcome) -> list[Result]:
    """Whether ours compute what plain training does: losses, and gradients where they stay."""
    plain = outcome.rows[who.PLAIN]
    results = []
    for name in (name for name in table.names if name in who.OURS and name in outcome.rows):
        pairs = list(zip(outcome.rows[name].steps, plain.steps, strict=False))
        same = sum(
            mine["loss"] == theirs["loss"] and mine["gradients"] == theirs["gradients"]
            for mine, theirs in pairs
        )
        share = same / len(pairs)
        claim = f"{table.title}: {name}: turns with plain's bits"
        results.append(Result(claim, same, len(pairs), "turns", share, 1.0))
    return results


def markdown(outcome: Outcome, job: Job) -> str:
    plain = outcome.rows[who.PLAIN]
    lines = [
        f"{outcome.parameters / 1e6:,.0f}M parameters, {job.tokens:,} tokens a step.",
        "",
        "| | tokens/s | of plain | forward, backward, update, s | step's peak above its begin, MiB "
        "| of plain | device memory, GiB | host memory, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in outcome.rows.items():
        parts = ", ".join(
            f"{rows.median(f'{part}_seconds'):.3f}" for part in ("forward", "backward", "update")
        )
        peak, whole = rows.median("peak_bytes"), plain.median("peak_bytes")
        lines.append(
            f"| {name} | {job.tokens / rows.median('seconds'):,.0f} "
            f"| {plain.median('seconds') / rows.median('seconds'):.3f} | {parts} "
            f"| {peak / MiB:,.0f} | {peak / whole if whole else 1.0:.3f} "
            f"| {rows.median('device_bytes') / GiB:.2f} | {rows.median('host_bytes') / GiB:.2f} |"
        )
    lines += [f"\n{name} did not take part: {why}" for name, why in outcome.skipped.items()]
    return "\n".join(lines)
