"""The peak memory that the engine predicts before the first step, and the measured peak."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.io.results import Result
from benchmarks.parameters.job import Job
from benchmarks.parameters.running import run
from offload_strategy.units import MiB

_STEPS = 4
_MOST_OFF = 0.1

#: Each differs from the others in several settings.
JOBS = (
    Job(2048, 8),
    Job(1536, 12, overlap="commit", pinned="512MiB"),
    Job(1024, 16, overlap="off", pinned="256MiB", blocks_in_flight=3),
    Job(2048, 12, pinned="512MiB", blocks_in_flight=3, state_dtype="bfloat16"),
    Job(1536, 8, overlap="commit", blocks_in_flight=3, state_dtype="bfloat16"),
)


def smaller(job: Job) -> Job:
    """A job that is quick, to see that it runs.

    Args:
        job: of `JOBS`.
    """
    return replace(job, width=job.width // 8, layers=4, pinned="64MiB")


def predicted(jobs: Sequence[Job], directory: Path, say: Callable[[str], None]) -> list[Result]:
    """Train each, without a limit of memory, and print what was expected and what came.

    Args:
        jobs: what to train; their steps and directories are set here.
        directory: on the disk.
        say: tells what is going on.
    """
    results = []
    for job in jobs:
        name = _name(job)
        say(name)
        with tempfile.TemporaryDirectory(prefix="benchmarks-memory-", dir=directory) as place:
            ran = run(replace(job, directory=place, steps=_STEPS, predict=True), say)
        expected = int(ran.must("predicted")["peak_bytes"])
        measured = int(ran.must("measured")["peak_bytes"])
        results.append(
            Result(
                f"memory: {name}",
                expected / MiB,
                measured / MiB,
                "MiB",
                abs(expected / measured - 1),
                _MOST_OFF,
                at_least=False,
            )
        )
    print("\n| | predicted, MiB | measured, MiB | off by |\n|---|---|---|---|")
    for result in results:
        off = result.ours / result.peer - 1
        print(f"| {result.name} | {result.ours:.0f} | {result.peer:.0f} | {off:+.1%} |")
    print()
    return results


def _name(job: Job) -> str:
    """What distinguishes a job."""
    return (
        f"{job.layers} layers of {job.width}, {job.overlap}, {job.blocks_in_flight} blocks, "
        f"{job.state_dtype}, pinned {job.pinned}"
    )
