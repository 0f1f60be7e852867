"""Plans, replays and searches, measured.

python -m benchmarks.planning --dir /mnt/nvme0        as root: paths are throttled
python -m benchmarks.planning --lines search          one line alone
python -m benchmarks.planning --quick                 tiny models: to see that it runs

Lines:

    predict   steps that were replayed before they were trained, relative to the steps as they were
    search    what `ssd-offload plan --search` finds, relative to the presets, on emulated machines
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

from benchmarks.io.results import Result, Skipped, conclude
from benchmarks.machine import describe_machine, say, tidy_up_when_ended
from benchmarks.planning.predict import predict
from benchmarks.planning.search import search

_LINES = {"predict": predict, "search": search}


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=_LINES, default=list(_LINES))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--steps", type=int, default=5, help="of each configuration that count")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    options = parser.parse_args()
    tidy_up_when_ended()
    machine = describe_machine(options.dir)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    results: list[Result] = []
    outcome: dict[str, object] = {"steps": options.steps, "quick": options.quick}
    texts: dict[str, str] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in options.lines:
        say(name)
        try:
            table, found, figures = _LINES[name](options.dir, options.steps, options.quick)
        except Skipped as why:
            say(f"skipped: {why}")
            skipped[name] = str(why)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
        else:
            results += found
            outcome["predicted" if name == "predict" else name] = figures
            texts[name] = table
            print("\n" + table)
    outcome |= {"texts": texts, "skipped": skipped, "failed": failed}
    status = conclude(results, options.json, machine, outcome)
    for title, reasons in (("skipped", skipped), ("failed", failed)):
        for name, reason in reasons.items():
            print(f"{title}: {name}: {reason}")
    return 1 if failed else status


if __name__ == "__main__":
    sys.exit(main())
