"""Runs that are killed (SIGKILL) at random moments and go on from their last checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.small import CHECKPOINT, Job
from benchmarks.io.results import Result

_ROOT = Path(__file__).resolve().parents[2]
#: No process takes longer.
_PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Kill:
    """What came of one killed run.

    Args:
        aimed_at: "any" moment of a random step, or "save": the next writing of a checkpoint.
        within_save: whether half a checkpoint was left behind.
        at_step: which had begun.
        resumed_from: the step of the last checkpoint; 0 if there was none.
        identical: whether the parameters at the end are those of the uninterrupted run.
        left: names that were there in the end and should not have been.
    """

    aimed_at: str
    within_save: bool
    at_step: int
    resumed_from: int
    identical: bool
    left: tuple[str, ...]


def kills(
    directory: Path, runs: int, job: Job, say: Callable[[str], None], seed: int = 0
) -> tuple[list[Kill], list[Result]]:
    """Kill runs, let them go on, and compare the end with that of uninterrupted ones.

    Args:
        directory: on the disk.
        runs: how many.
        job: what each shall do; its folders are set here.
        say: tells what is going on.
        seed: of the random moments.
    """
    chance = random.Random(seed)
    with _folders(directory, job) as own:
        plain = _finish(replace(own, overlap="", every=0))
    with _folders(directory, job) as own:
        whole = _finish(own)
    say(f"uninterrupted: {job.steps} steps, {whole['seconds']:.1f} s")
    found = []
    for number in range(runs):
        with _folders(directory, job) as own:
            aimed_at = "save" if number % 2 else "any"
            kill = _killed(own, aimed_at, whole, chance)
        found.append(kill)
        say(f"run {number + 1} of {runs}: {kill}")
    right = sum(kill.identical and not kill.left for kill in found)
    within = sum(kill.within_save for kill in found)
    same = float(whole["digest"] == plain["digest"])
    return found, [
        Result("kills: resumed bit-identical, nothing left", right, runs, "runs", right / runs, 1),
        Result("kills: of these within a save", within, runs, "runs", within / runs, 1 / runs),
        Result("kills: uninterrupted as plain AdamW", same, 1, "runs", same, 1),
    ]


def table(found: list[Kill]) -> str:
    """One line a run, in Markdown."""
    lines = [
        "| run | aimed at | killed in step | within a save | resumed from step | end |",
        "|---|---|---|---|---|---|",
    ]
    for number, kill in enumerate(found, 1):
        end = "identical" if kill.identical else "DIFFERENT"
        left = f", left: {', '.join(kill.left)}" if kill.left else ""
        lines.append(
            f"| {number} | {kill.aimed_at} | {kill.at_step} "
            f"| {'yes' if kill.within_save else 'no'} | {kill.resumed_from} | {end}{left} |"
        )
    return "\n".join(lines)


@contextlib.contextmanager
def _folders(directory: Path, job: Job) -> Iterator[Job]:
    """The job with its own folders."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-checkpoints-", dir=directory) as place:
        folder, tier = Path(place, "checkpoints"), Path(place, "tier")
        folder.mkdir()
        tier.mkdir(mode=0o700)
        yield replace(job, folder=str(folder), tier=str(tier))


def _killed(job: Job, aimed_at: str, whole: dict[str, Any], chance: random.Random) -> Kill:
    """Kill a run at a random step, at a random moment of that step or of the save that follows."""
    folder, step_seconds = Path(job.folder), whole["seconds"] / job.steps
    with _started(job) as process:
        # The last steps are left: a run that has ended cannot be killed.
        number = chance.randrange(job.steps - job.every)
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == number:
                break
        if aimed_at == "save":
            _wait_for_a_save(process, folder)
            time.sleep(chance.uniform(0, 0.01))
        else:
            time.sleep(chance.uniform(0, step_seconds))
        if process.poll() is not None:
            raise RuntimeError(f"{job} ended before it was killed; see its errors above")
        process.kill()
        process.wait(_PATIENCE_SECONDS)
    within = any(name != CHECKPOINT for name in os.listdir(folder))
    resumed = _finish(job)
    left = {*os.listdir(folder), *os.listdir(job.tier)} - {CHECKPOINT}
    same = resumed["digest"] == whole["digest"]
    return Kill(aimed_at, within, number, resumed["begin"], same, tuple(sorted(left)))


def _wait_for_a_save(process: subprocess.Popen[str], folder: Path) -> None:
    """Until a checkpoint is being written, or the process ended."""
    while process.poll() is None and not set(os.listdir(folder)) - {CHECKPOINT}:
        time.sleep(0.0003)


def _finish(job: Job) -> dict[str, Any]:
    """Let a job end; what it printed last."""
    with _started(job) as process:
        assert process.stdout is not None
        last = list(process.stdout)[-1:]
        if process.wait(_PATIENCE_SECONDS) != 0:
            raise RuntimeError(
                f"{job} ended with status {process.returncode}; see its errors above"
            )
    found: dict[str, Any] = json.loads(last[0])
    return found


@contextlib.contextmanager
def _started(job: Job) -> Iterator[subprocess.Popen[str]]:
    """A process that trains."""
    command = [sys.executable, "-m", "benchmarks.checkpoints.small", json.dumps(asdict(job))]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
