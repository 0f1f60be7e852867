"""Run lines and print what they found.

    python -m benchmarks.io                      every line
    python -m benchmarks.io bulk cpu --quick     some, small: to see that they run

Files are made under --dir, which should be on the disk to be measured, and removed at the end. The
exit status is 1 if a line that was judged did not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from benchmarks.io.buffers import buffers
from benchmarks.io.bulk import bulk
from benchmarks.io.checksums import checksums
from benchmarks.io.cpu import cpu
from benchmarks.io.encryption import encryption
from benchmarks.io.faults import faults
from benchmarks.io.overflow import overflow
from benchmarks.io.processes import processes
from benchmarks.io.results import Context, Line, Result, Skipped, table, write_json
from benchmarks.io.small import small
from benchmarks.io.two_paths import two_paths
from benchmarks.io.urgent import urgent
from benchmarks.machine import describe_machine, say, tidy_up_when_ended

LINES: dict[str, Line] = {
    "bulk": bulk,
    "small": small,
    "cpu": cpu,
    "two_paths": two_paths,
    "processes": processes,
    "urgent": urgent,
    "buffers": buffers,
    "encryption": encryption,
    "checksums": checksums,
    "overflow": overflow,
    "faults": faults,
}


def main() -> int:
    """Parse the options, run the lines, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.io", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("lines", nargs="*", metavar="LINE", help=f"of {', '.join(LINES)}")
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="where files are made"
    )
    parser.add_argument("--repeats", type=int, help="alternations (5; with --quick 2)")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="small and few; figures mean little")
    options = parser.parse_args()
    unknown = set(options.lines) - set(LINES)
    if unknown:
        parser.error(f"there is no line {', '.join(sorted(unknown))}; choose of {', '.join(LINES)}")
    tidy_up_when_ended()

    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    repeats = options.repeats or (2 if options.quick else 5)
    results: list[Result] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-io-", dir=options.dir) as folder:
        context = Context(Path(folder), repeats, options.quick, say)
        for name in options.lines or LINES:
            say(name)
            try:
                found = LINES[name](context)
            except Skipped as why:
                skipped[name] = str(why)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
            else:
                results += found
                say("\n" + table(found))

    print(f"\nmedians of {repeats} alternations{' (quick: of little meaning)' * options.quick}\n")
    print(table(results))
    print("\npeers:")
    for result in results:
        if result.command:
            print(f"  {result.name}\n      {result.command}")
    for title, reasons in (("skipped", skipped), ("failed", failed)):
        for name, reason in reasons.items():
            print(f"{title}: {name}: {reason}")
    if options.json is not None:
        outcome: dict[str, Any] = {
            "repeats": repeats,
            "quick": options.quick,
            "results": [result.as_dict() for result in results],
            "skipped": skipped,
            "failed": failed,
        }
        write_json(options.json, machine, outcome)
    return int(bool(failed) or any(result.judged and not result.held for result in results))


if __name__ == "__main__":
    sys.exit(main())
