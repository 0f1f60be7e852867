"""A checkpoint saved and loaded with little memory above what training takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.large import Job
from benchmarks.io.results import Result, Skipped
from benchmarks.memory_group import memory_group, why_not
from offload_strategy.units import format_size

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Phase:
    """What came of one process.

    Args:
        name: of `large.PHASES`.
        limit: of its memory group, in bytes; None for none.
        peak_bytes: of the group, pages of files included.
        at_the_limit: how often the group had to give pages back.
        status: of the process: 0, or -9 if it was killed for memory.
        answer: what it printed.
    """

    name: str
    limit: int | None
    peak_bytes: int
    at_the_limit: int
    status: int
    answer: dict[str, Any]


def limit(
    directory: Path, job: Job, share: float, say: Callable[[str], None]
) -> tuple[list[Phase], list[Result]]:
    """Measure training's own peak, then save and load with `share` of the states' size above it.

    Args:
        directory: on the disk.
        job: the model and its training; file, directory and phase are set here.
        share: of the states' size.
        say: tells what is going on.

    Raises:
        Skipped: there are no memory groups here.
    """
    why = why_not()
    if why is not None:
        raise Skipped(why)
    # What Python and the libraries read from disk must not count as memory of the first process.
    subprocess.run([sys.executable, "-c", "import benchmarks.checkpoints.large"], cwd=_ROOT)
    with tempfile.TemporaryDirectory(prefix="benchmarks-checkpoints-", dir=directory) as place:
        job = replace(job, file=str(Path(place, "last.ckpt")), directory=place)
        train = _run(replace(job, phase="train"), None)
        _check(train)
        states = int(train.answer["state_bytes"])
        bound = train.peak_bytes + int(share * states)
        say(
            f"{train.answer['parameters']:,} parameters, states {format_size(states)}; training "
            f"peaks at {format_size(train.peak_bytes)}, the limit is {format_size(bound)}"
        )
        phases = [train]
        for name in ("save", "resume"):
            phase = _run(replace(job, phase=name), bound)
            phases.append(phase)
            say(f"{name}: status {phase.status}, peak {format_size(phase.peak_bytes)}")
            if phase.status != 0:
                break
    survived = sum(phase.status == 0 for phase in phases[1:])
    same = float(phases[-1].answer.get("digest") == train.answer["digest"])
    above = (bound - train.peak_bytes) / states
    return phases, [
        Result("limit: above training's peak, of the states", above, 1, "share", above, 0.5, False),
        Result("limit: saved, and loaded elsewhere", survived, 2, "processes", survived / 2, 1),
        Result("limit: last step as if uninterrupted", same, 1, "runs", same, 1),
    ]


def table(phases: list[Phase]) -> str:
    """One line a process, in Markdown."""
    lines = [
        "| process | limit | peak of the group, with pages of files | VmHWM, with libraries "
        "| seconds | end |",
        "|---|---|---|---|---|---|",
    ]
    for phase in phases:
        answer = phase.answer
        seconds = ", ".join(
            f"{name.removesuffix('_seconds')} {value:.1f}"
            for name, value in answer.items()
            if name.endswith("_seconds")
        )
        own = format_size(answer["peak_rss_bytes"]) if answer else ""
        lines.append(
            f"| {phase.name} | {format_size(phase.limit) if phase.limit else 'none'} "
            f"| {format_size(phase.peak_bytes)} | {own} | {seconds} "
            f"| {'survived' if phase.status == 0 else f'status {phase.status}'} |"
        )
    return "\n".join(lines)


def _run(job: Job, bound: int | None) -> Phase:
    command = [sys.executable, "-m", "benchmarks.checkpoints.large", json.dumps(asdict(job))]
    with memory_group(bound) as group:
        done = subprocess.run(
            group.command(command), cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=False
        )
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
        peak, often = group.peak_bytes(), group.times_at_the_limit()
    return Phase(job.phase, bound, peak, often, done.returncode, answer)


def _check(phase: Phase) -> None:
    if phase.status != 0:
        raise RuntimeError(f"{phase.name} ended with status {phase.status}; see its errors above")
