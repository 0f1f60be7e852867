"""CPU time per byte: at most half of DeepNVMe's."""

from __future__ import annotations

import statistics

from benchmarks.io.results import Context, Result, Skipped, median_ratio
from benchmarks.io.tuned_peers import DEEPNVME, DIRECTIONS, FIO, OURS, contest
from offload_strategy.units import GiB


def cpu(context: Context) -> list[Result]:
    """CPU seconds, user and system, that a process spends per GiB written and read.

    From the same runs as `bulk`: there, each contender is its own process.
    """
    held = contest(context)
    if DEEPNVME not in held.peers:
        raise Skipped(held.missing[DEEPNVME])
    gib = 2 * held.nbytes / GiB

    def per_gib(name: str) -> list[float]:
        rounds = zip(*(held.cpu_seconds[name, direction] for direction in DIRECTIONS), strict=True)
        return [sum(both) / gib for both in rounds]

    ours, theirs = per_gib(OURS), per_gib(DEEPNVME)
    details = {
        f"{name} {direction}": statistics.median(held.cpu_seconds[name, direction]) * 2 / gib
        for name in (OURS, DEEPNVME, FIO)
        for direction in DIRECTIONS
        if (name, direction) in held.cpu_seconds
    }
    return [
        Result(
            name="cpu: written and read, relative to DeepNVMe",
            ours=statistics.median(ours),
            peer=statistics.median(theirs),
            unit="s/GiB",
            ratio=median_ratio(ours, theirs),
            threshold=0.5,
            at_least=False,
            command=" | ".join(held.commands[DEEPNVME, direction] for direction in DIRECTIONS),
            details={"seconds_per_gib": details, "ours": ours, "peer": theirs},
        )
    ]
