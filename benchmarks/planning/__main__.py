"""Plans and replays, measured.

python -m benchmarks.planning --dir /mnt/nvme0        as root: paths are throttled
python -m benchmarks.planning --quick                 tiny models: to see that it runs
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.io.results import Result, Skipped, conclude
from benchmarks.machine import describe_machine, say
from benchmarks.planning.predict import predict


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", type=int, default=5, help="of each configuration that count")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    options = parser.parse_args()
    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results: list[Result] = []
    outcome: dict[str, object] = {"steps": options.steps, "quick": options.quick}
    try:
        table, results, figures = predict(options.dir, options.steps, options.quick)
        outcome["predicted"] = figures
        print("\n" + table)
    except Skipped as why:
        say(f"skipped: {why}")
        outcome["skipped"] = str(why)
    return conclude(results, options.json, machine, outcome)


if __name__ == "__main__":
    sys.exit(main())
