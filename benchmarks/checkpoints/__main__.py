"""Checkpoints that survive: `kill -9` at any moment, and little memory above training's own.

    python -m benchmarks.checkpoints --dir /mnt/nvme0           both lines
    python -m benchmarks.checkpoints --lines kills --runs 20
    python -m benchmarks.checkpoints --lines limit --overlap eager      a 320M GPT (root)
    python -m benchmarks.checkpoints --quick                    small and few: to see that it runs

kills: a tiny GPT saves itself every few steps with `offload_strategy.save` and is killed (SIGKILL)
at a random moment, every other time while it saves; it goes on from its last checkpoint and must
end with the very parameters of an uninterrupted run.

limit: a GPT of about 320 million parameters trains in a memory group without a limit, which gives
training's own peak, pages of files included. In a group that has less than half of the states' size
more than that it trains, is saved, and another process loads it and trains the last step.

The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.checkpoints import kills, large, limit, small
from benchmarks.io.results import Result, Skipped, conclude
from benchmarks.machine import describe_machine, say

_LINES = ("kills", "limit")


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=_LINES, default=_LINES)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--overlap", default="commit", help="optimizer.overlap, in both lines")
    parser.add_argument("--runs", type=int, default=20, help="kills: how many are killed")
    parser.add_argument("--steps", type=int, default=200, help="kills: of a run")
    parser.add_argument("--every", type=int, default=5, help="kills: steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="kills: of the random moments")
    parser.add_argument("--share", type=float, default=0.45, help="limit: of the states' size")
    parser.add_argument("--pinned", default="4GiB", help="limit: memory.pinned")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="small and few; it means little")
    options = parser.parse_args()

    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results: list[Result] = []
    outcome: dict[str, object] = {"overlap": options.overlap, "quick": options.quick}
    if "kills" in options.lines:
        tiny = small.Job("", "", options.steps, options.every, options.overlap)
        runs = options.runs
        if options.quick:
            tiny, runs = replace(tiny, steps=40), 2
        found, claims = kills.kills(options.dir, runs, tiny, say, options.seed)
        results += claims
        outcome["kills"] = [asdict(kill) for kill in found]
        print(f"\n{tiny.steps} steps, a checkpoint every {tiny.every}\n\n" + kills.table(found))
    if "limit" in options.lines:
        job = large.Job("", "", "", overlap=options.overlap, pinned=options.pinned)
        if options.quick:
            job = replace(job, width=512, layers=8)
        try:
            phases, claims = limit.limit(options.dir, job, options.share, say)
            results += claims
            outcome["limit"] = [asdict(phase) for phase in phases]
            answer = phases[0].answer
            print(f"\nGPT, {answer['parameters']:,} parameters, batch {job.batch}×{job.sequence}")
            print("\n" + limit.table(phases), flush=True)
        except Skipped as why:
            say(f"skipped: limit: {why}")
            outcome["skipped"] = {"limit": str(why)}
    return conclude(results, options.json, machine, outcome)


if __name__ == "__main__":
    sys.exit(main())
