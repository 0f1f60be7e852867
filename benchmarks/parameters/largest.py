"""The largest model that trains within a limit of memory, by doubling its layers."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.io.results import Result, Skipped
from benchmarks.memory_group import why_not
from benchmarks.parameters.job import Job
from benchmarks.parameters.running import ROOT, TRAINS, Ran, last_words, run
from offload_strategy.units import format_size

_DEEPSPEED = "benchmarks.parameters.deepspeed_subject"
#: Disk that must be free, as a multiple of the bytes that are needed.
_MARGIN = 1.15
_STEPS = 2
_TIMES_PLAIN = 10.0


@dataclass(frozen=True)
class Contender:
    """Who trains.

    Args:
        name: for the table.
        module: that trains.
        disk_bytes: for each parameter; 0 for everything in memory.
        state_dtype: of the optimizer.
    """

    name: str
    module: str = TRAINS
    disk_bytes: int = 0
    state_dtype: str = "float32"


CONTENDERS = {
    "plain": Contender("plain PyTorch"),
    # Weights twice, gradients, and two moments.
    "deepspeed": Contender("DeepSpeed ZeRO-3, all on NVMe", _DEEPSPEED, 20),
    "ours": Contender("ours, fp32", disk_bytes=12),
    "bf16": Contender("ours, states in bf16", disk_bytes=8, state_dtype="bfloat16"),
}


@dataclass(frozen=True)
class Bounds:
    """What is tried.

    Args:
        limit: of the memory group, in bytes.
        first: layers of the first model.
        most: layers of the last one, if all before it train.
        minutes: of one run.
    """

    limit: int
    first: int = 1
    most: int = 4096
    minutes: float = 12.0


@dataclass(frozen=True)
class Trained:
    """A model that trained.

    Args:
        parameters: of it.
        layers: likewise.
        seconds: of its second step.
        peak_bytes: of its memory group.
    """

    parameters: int
    layers: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Found:
    """What came of a contender.

    Args:
        best: the largest that trained, if any did.
        why: there is no larger one.
    """

    best: Trained | None
    why: str

    @property
    def parameters(self) -> float:
        """Of the largest that trained."""
        return math.nan if self.best is None else self.best.parameters


def largest(
    job: Job,
    directory: Path,
    bounds: Bounds,
    say: Callable[[str], None],
    names: Sequence[str] = tuple(CONTENDERS),
) -> list[Result]:
    """Let each contender train larger and larger models, and print the largest of each.

    Args:
        job: what to train; its layers, steps and directories are set here.
        directory: on the disk.
        bounds: what is tried.
        say: tells what is going on.
        names: of `CONTENDERS`.

    Raises:
        Skipped: there are no memory groups here.
    """
    why = why_not()
    if why is not None:
        raise Skipped(why)
    found = {}
    for name in names:
        found[name] = _of(CONTENDERS[name], job, directory, bounds, say)
        say(f"{CONTENDERS[name].name}: {found[name]}")
    print(table(found, bounds))
    return _claims(found)


def table(found: dict[str, Found], bounds: Bounds) -> str:
    """A row a contender, in Markdown.

    Args:
        found: by names of `CONTENDERS`.
        bounds: what was tried.
    """
    lines = [
        f"\nthe largest that trains {_STEPS} steps within {format_size(bounds.limit)}\n",
        "| | parameters | layers | second step, s | peak of the group | why no larger |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        best = one.best
        figures = (
            "none | | | "
            if best is None
            else f"{best.parameters:,} | {best.layers} | {best.seconds:.1f} | "
            f"{format_size(best.peak_bytes)}"
        )
        why = one.why.replace("|", "\\|")
        lines.append(f"| {CONTENDERS[name].name} | {figures} | {why} |")
    return "\n".join(lines) + "\n"


def doubling(attempt: Callable[[int], Trained | str], bounds: Bounds) -> Found:
    """Try larger and larger models until one fails; smaller ones if the first does.

    Args:
        attempt: trains a model of so many layers, or says why it does not.
        bounds: what is tried.
    """
    best: Trained | None = None
    why: str | None = None
    layers = bounds.first
    while 1 <= layers <= bounds.most:
        tried = attempt(layers)
        if isinstance(tried, Trained):
            best = tried
            if why is not None:  # twice as many failed already
                break
            layers *= 2
        else:
            why = f"{layers} layer{'s' * (layers > 1)}: {tried}"
            if best is not None:
                break
            layers //= 2
    return Found(best, why or "no larger one was tried")


def _of(
    contender: Contender, job: Job, directory: Path, bounds: Bounds, say: Callable[[str], None]
) -> Found:
    if contender.module == _DEEPSPEED:
        # Not within the group: a compiler takes memory of its own.
        command = [sys.executable, "-m", _DEEPSPEED]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            return Found(None, f"cannot be used here: {last_words(built.stderr)}")

    def attempt(layers: int) -> Trained | str:
        larger = replace(
            job, layers=layers, steps=_STEPS, saved=None, state_dtype=contender.state_dtype
        )
        return _attempt(contender, larger, directory, bounds, say)

    return doubling(attempt, bounds)


def _attempt(
    contender: Contender, job: Job, directory: Path, bounds: Bounds, say: Callable[[str], None]
) -> Trained | str:
    """Train a model, or say why that is not possible."""
    parameters = job.parameters
    need = int(_MARGIN * contender.disk_bytes * parameters)
    free = shutil.disk_usage(directory).free
    if need > free:
        return f"{format_size(need)} of disk are needed, {format_size(free)} are free"
    say(f"{contender.name}, {job.layers} layers, {parameters:,} parameters")
    with tempfile.TemporaryDirectory(prefix="benchmarks-largest-", dir=directory) as place:
        ran = run(
            replace(job, directory=place if contender.disk_bytes else None),
            say,
            module=contender.module,
            limit=bounds.limit,
            seconds=60 * bounds.minutes,
        )
    # What happens to a process after its last event is no part of the training.
    if not ran.of("end"):
        return _why(ran, bounds)
    return Trained(parameters, job.layers, ran.of("step")[-1]["seconds"], ran.peak_bytes)


def _why(ran: Ran, bounds: Bounds) -> str:
    """There was no end."""
    steps = len(ran.of("step"))
    when = f"after {steps} steps" if ran.of("start") else "while it was made"
    if ran.overdue:
        return f"takes longer than {bounds.minutes:g} minutes"
    return f"{ran.end} {when}" if ran.killed else f"fails {when}, {ran.end}"


def _claims(found: dict[str, Found]) -> list[Result]:
    results = []
    for ours, peer, threshold in (
        ("ours", "plain", _TIMES_PLAIN),
        ("bf16", "plain", None),
        ("ours", "deepspeed", None),
    ):
        if ours in found and peer in found:
            mine, other = found[ours].parameters, found[peer].parameters
            results.append(
                Result(
                    f"largest: {CONTENDERS[ours].name}, relative to {CONTENDERS[peer].name}",
                    mine,
                    other,
                    "parameters",
                    mine / other,
                    threshold or 0,
                    judged=threshold is not None,
                    details={"why": {name: found[name].why for name in (ours, peer)}},
                )
            )
    return results
