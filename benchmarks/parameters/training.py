"""Training a model whose weights, gradients and states are several times its memory.

What a step takes at least is the longer of two: computing alone, and moving its bytes at the path's
measured bandwidth (read bytes over what it reads, plus written bytes over what it writes). The
model does not fit for the former, so plain PyTorch trains two with fewer of its layers, outside of
the group, and their difference counts for each of the other layers.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.io.results import Result, Skipped
from benchmarks.memory_group import why_not
from benchmarks.parameters.job import Job
from benchmarks.parameters.running import Bandwidth, bandwidth, run
from offload_strategy.units import GiB, format_size

#: Of the bound, in the median of all steps but the first.
_MOST = 1.25


def training(
    job: Job, directory: Path, limit: int, say: Callable[[str], None], *, plain: bool = True
) -> list[Result]:
    """Train in a memory group: plainly, which the system kills, and streamed; print the steps.

    Args:
        job: what to train; its directories are set here.
        directory: on the disk.
        limit: of the group, in bytes.
        say: tells what is going on.
        plain: whether plain PyTorch tries, too.

    Raises:
        Skipped: there are no memory groups here.
    """
    why = why_not()
    if why is not None:
        raise Skipped(why)
    results = []
    if plain:
        ran = run(replace(job, directory=None), say, limit=limit)
        print(
            f"plain PyTorch within {format_size(limit)}: {ran.end} after {len(ran.of('step'))} "
            f"steps, peak {format_size(ran.peak_bytes)}"
        )
        killed = float(ran.killed)
        results.append(Result("train: plain PyTorch is killed", killed, 1, "runs", killed, 1))
    with tempfile.TemporaryDirectory(prefix="bigger-than-memory-", dir=directory) as place:
        streamed = replace(job, directory=place, saved=str(Path(place, "saved")))
        ran = run(streamed, say, limit=limit)
    steps = ran.of("step")
    bounds = _table(steps, _compute_seconds(job), bandwidth(directory))
    print(f"streamed within {format_size(limit)}: {ran.end}, peak {format_size(ran.peak_bytes)}\n")
    # Blocks are fetched ahead from the second step on.
    taken, bounds = [step["seconds"] for step in steps[1:]], bounds[1:]
    ratios = [seconds / bound for seconds, bound in zip(taken, bounds, strict=True)]
    losses = [step["loss"] for step in steps] or [math.nan]
    trained = float(len(steps) == job.steps and ran.status == 0)
    return [
        *results,
        Result("train: streamed, to the end", trained, 1, "runs", trained, 1),
        Result(
            "train: a step, relative to the longer of computation and transfers",
            _median(taken),
            _median(bounds),
            "s",
            _median(ratios),
            _MOST,
            at_least=False,
            details={"steps": steps},
        ),
        Result(
            "train: last loss, relative to the first",
            losses[-1],
            losses[0],
            "nats",
            losses[-1] / losses[0],
            0.999,
            at_least=False,
        ),
    ]


def _table(steps: list[dict[str, Any]], compute: float, path: Bandwidth) -> list[float]:
    """Print a row a step; the least seconds that each can take.

    Args:
        steps: events.
        compute: seconds of computing alone.
        path: what it reads and writes.
    """
    read, write = path
    print(
        f"\ncomputing alone {compute:.2f} s a step; the path reads {read / 1e9:.2f} and "
        f"writes {write / 1e9:.2f} GB/s\n\n"
        "| step | loss | s | compute | read | write | stall | read GiB | written GiB | of bound |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    bounds = []
    for step in steps:
        reading, writing = step["read_bytes"] / read, step["written_bytes"] / write
        bounds.append(max(compute, reading + writing))
        stall = sum(value for name, value in step.items() if name.endswith("_stall"))
        print(
            f"| {step['step']} | {step['loss']:.4f} | {step['seconds']:.2f} | {compute:.2f} | "
            f"{reading:.2f} | {writing:.2f} | {stall:.2f} | {step['read_bytes'] / GiB:.2f} | "
            f"{step['written_bytes'] / GiB:.2f} | {step['seconds'] / bounds[-1]:.3f} |"
        )
    return bounds


def _compute_seconds(job: Job) -> float:
    """Of a step that moves nothing."""
    few, more = 2, 8
    seconds = {}
    for layers in (few, more):
        small = replace(job, layers=layers, steps=6, directory=None)
        steps = [step["seconds"] for step in run(small, lambda line: None).of("step")]
        if not steps:
            raise RuntimeError(f"plain PyTorch cannot train {layers} layers outside of the group")
        seconds[layers] = min(steps)  # what it can be: memory is mapped in the first ones
    each = (seconds[more] - seconds[few]) / (more - few)
    return seconds[few] + (job.layers - few) * each


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan
