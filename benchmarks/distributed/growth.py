"""What a machine writes, and a rank has in memory, as ranks are added."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.io.results import Context, Result, alternating, median_ratio
from offload_strategy.units import MiB

_ROOT = Path(__file__).resolve().parents[2]
_SIZES = (1, 2, 4)
_STEPS = 5
#: Before it, states and copies of weights are made.
_FIRST_STEADY_STEP = 2
_PATIENCE_SECONDS = 900


def growth(context: Context) -> list[Result]:
    """One, two and four ranks of DDP with streamed weights, in turns, by each way to update.

    Ranks of a machine have one copy of the weights, and each a part of the states, so that neither
    the bytes that the machine writes in a step nor the memory of a rank grow with their number.
    Losses and weights must be those of the same ranks without offload, to the last bit.
    """
    results: list[Result] = []
    for overlap in ("eager", "commit"):
        runs: dict[int, list[list[dict[str, Any]]]] = {size: [] for size in _SIZES}
        for number in range(context.repeats):
            for name in alternating([str(size) for size in _SIZES], number):
                context.say(f"growth, {overlap}, {name} ranks, {number + 1} of {context.repeats}")
                runs[int(name)].append(_run(context, int(name), overlap, offload=True))
        for size in _SIZES:
            plain = _run(context, size, overlap, offload=False)
            expected = [rank["digest"] for rank in plain]
            if any([rank["digest"] for rank in run] != expected for run in runs[size]):
                raise RuntimeError(f"{overlap}, {size} ranks: not the numbers of plain DDP")
        for size in _SIZES[1:]:
            results += _results(overlap, size, runs[1], runs[size])
    return results


def _results(
    overlap: str, size: int, alone: list[list[dict[str, Any]]], ranks: list[list[dict[str, Any]]]
) -> list[Result]:
    found = []
    for what, unit, scale, most, of in (
        ("written by the machine in a step", "MB", 1e6, 1.05, _written),
        ("peak memory of a rank", "MiB", MiB, 1.1, _peak),
    ):
        ours, peer = [of(run) for run in ranks], [of(run) for run in alone]
        found.append(
            Result(
                name=f"growth, {overlap}, {size} ranks: {what}",
                ours=statistics.median(ours) / scale,
                peer=statistics.median(peer) / scale,
                unit=unit,
                ratio=median_ratio(ours, peer),
                threshold=most,
                at_least=False,
                command="one rank, the same model",
                details={"ranks": ranks, "alone": alone},
            )
        )
    return found


def _written(run: list[dict[str, Any]]) -> float:
    """Bytes of all ranks in a steady step."""
    steps = range(_FIRST_STEADY_STEP, _STEPS)
    return statistics.median(sum(sum(r["written"][s].values()) for r in run) for s in steps)


def _peak(run: list[dict[str, Any]]) -> float:
    return float(max(rank["peak"] for rank in run))


def _run(context: Context, size: int, overlap: str, *, offload: bool) -> list[dict[str, Any]]:
    """Train with so many ranks; return what each of them has printed."""
    store = context.directory / "store"
    store.unlink(missing_ok=True)
    settings = {
        "directory": str(context.directory),
        "store": str(store),
        "steps": _STEPS,
        "overlap": overlap,
        "offload": offload,
        "quick": context.quick,
    }
    command = [sys.executable, "-m", "benchmarks.distributed.growth_rank", json.dumps(settings)]
    ranks = []
    try:
        for rank in range(size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            ranks.append(
                subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=subprocess.PIPE)
            )
        outputs = [rank.communicate(timeout=_PATIENCE_SECONDS)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"ranks have ended with {[rank.returncode for rank in ranks]}")
        return [json.loads(output.splitlines()[-1]) for output in outputs]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
