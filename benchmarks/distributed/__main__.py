"""Several processes that train together, measured.

    python -m benchmarks.distributed --dir /mnt/nvme0           every line
    python -m benchmarks.distributed --lines path --quick       small: to see that it runs

Lines:

    path      four ranks on one throttled path compared with one rank (root: loop devices)
    machines  two machines of two ranks, of which one is killed in each of 20 runs
    growth    bytes written by a machine, and memory of a rank, with 1, 2 and 4 ranks of DDP

The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.distributed.growth import growth
from benchmarks.distributed.machines import machines
from benchmarks.distributed.path import path
from benchmarks.io.results import Context, Line, Result, Skipped, conclude
from benchmarks.machine import describe_machine, say, tidy_up_when_ended

LINES: dict[str, Line] = {"path": path, "machines": machines, "growth": growth}


def main() -> int:
    """Parse the options, run the lines, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distributed", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, help="alternations (5; with --quick 2)")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="small and few; figures mean little")
    options = parser.parse_args()
    tidy_up_when_ended()
    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    repeats = options.repeats or (2 if options.quick else 5)
    results: list[Result] = []
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-distributed-", dir=options.dir) as folder:
        context = Context(Path(folder), repeats, options.quick, say)
        for name in options.lines:
            say(name)
            try:
                results += LINES[name](context)
            except Skipped as why:
                skipped[name] = str(why)
                print(f"skipped: {name}: {why}")
    print(f"\nmedians of {repeats} alternations{' (quick: of little meaning)' * options.quick}")
    outcome = {"repeats": repeats, "quick": options.quick, "skipped": skipped}
    return conclude(results, options.json, machine, outcome)


if __name__ == "__main__":
    sys.exit(main())
