"""Run every benchmark that this machine can run, and rebuild the page of results.

    make bench                                      all of it, about an hour on two cores
    make bench-quick                                tiny models, to see that it runs
    python -m benchmarks.suite --second             all of it again, and both runs on the page
    python -m benchmarks.suite --only planning io   some parts
    python -m benchmarks.suite --page               run nothing: the page from the figures there are

Figures go to JSON, a file for each part; the page is made from those alone. The exit status is 1 if
a part failed or took too long; claims that do not hold are on the page, and no failure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import tidy_up_when_ended
from benchmarks.suite.page import write_page
from benchmarks.suite.parts import PARTS, Part

ROOT = Path(__file__).resolve().parents[2]
FIGURES, PAGE = ROOT / "docs" / "results" / "cpu", ROOT / "docs" / "results.md"
#: Of a second run, relative to the first one.
SECOND = "second"
#: Status of a benchmark of which every line was skipped.
_NOTHING_RAN = 2
_BAR = 30


def main() -> int:
    """Parse the options, run, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=(__doc__ or "").partition("\n")[0]
    )
    names = [part.name for part in PARTS]
    by_default = [part.name for part in PARTS if not part.asked]
    parser.add_argument("--only", nargs="+", choices=names, default=by_default, metavar="PART",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="of the disk")
    parser.add_argument("--figures", type=Path, help="where JSON goes (default: docs/results/cpu)")
    parser.add_argument("--out", type=Path, help="the page (default: docs/results.md)")
    parser.add_argument(
        "--second", action="store_true", help="a second run, in addition to the existing figures"
    )
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    options = parser.parse_args()
    tidy_up_when_ended()
    # What a quick run finds is no evidence, and must not replace any.
    quick_place = Path(tempfile.gettempdir()) / "offload-strategy-bench-quick"
    figures: Path = options.figures or (quick_place if options.quick else FIGURES)
    page: Path = options.out or (figures / "results.md" if options.quick else PAGE)
    into = figures / SECOND if options.second else figures
    into.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    if not options.page:
        failed = _run([p for p in PARTS if p.name in options.only], into, options)
    write_page(figures, page, figures / SECOND)
    print(f"\n{page.read_text()}\nwritten to {page}")
    for line in failed:
        print(line, file=sys.stderr)
    return int(bool(failed))


def _run(parts: Sequence[Part], figures: Path, options: argparse.Namespace) -> list[str]:
    """Run the parts; return a line for each failure. Unused time goes to the following parts."""
    quick = options.quick
    left = sum(part.minutes[quick] for part in parts)
    spare = 0.0
    failed = []
    for number, part in enumerate(parts):
        done = _BAR * number // len(parts)
        print(
            f"[{'#' * done}{'.' * (_BAR - done)}] {number + 1} of {len(parts)}: {part.name}; at "
            f"most {left:.0f} minutes to go",
            file=sys.stderr,
            flush=True,
        )
        begin = time.monotonic()
        most = part.minutes[quick] + spare
        problem = _run_part(part, figures, options.dir, most, quick=quick)
        took = (time.monotonic() - begin) / 60
        left, spare = left - took, most - took
        if problem is not None:
            failed.append(f"{part.name}: {problem}")
        print(f"{part.name}: {took:.1f} minutes", file=sys.stderr)
    return failed


def _run_part(
    part: Part, figures: Path, directory: Path, minutes: float, *, quick: bool
) -> str | None:
    """Run one part, so many minutes at most; why it failed, if it did."""
    file = figures / f"{part.name}.json"
    command = [sys.executable, *part.command(quick=quick), "--dir", str(directory)]
    command += ["--json", str(file)]
    if part.name == "activations":
        command += ["--plot", str(figures / "activations.svg")]
    before = file.stat().st_mtime_ns if file.exists() else None
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        status = process.wait(timeout=60 * minutes)
    except (subprocess.TimeoutExpired, SystemExit) as ended:
        process.terminate()  # it takes its disks and groups down
        process.wait()
        if isinstance(ended, SystemExit):  # by SIGTERM; Ctrl-C reaches the benchmark by itself
            raise
        return f"ended after {minutes:.0f} minutes"
    if not file.exists() or file.stat().st_mtime_ns == before:
        return f"it wrote no figures (status {status})"
    return None


if __name__ == "__main__":
    sys.exit(main())
