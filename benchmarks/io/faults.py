"""Faults, each provoked for real: what the user sees of it, and what is left behind.

    python -m benchmarks.io.faults [--markdown] [FAULT ...]

prints the table of docs/faults.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.disks import why_not
from benchmarks.faults.subject import Outcome
from benchmarks.faults.table import FAULTS, Fault
from benchmarks.io.results import Context, Result, Skipped

Row = tuple[str, str, str]
_WEIGHTS = {
    "right": "weights of the last whole step",
    "half a step": "weights of which some are a step ahead",
    "wrong": "wrong weights",
}
_WIDTHS = (30, 80, 34)


def faults(context: Context) -> list[Result]:
    """All of the table; a line holds if everything was as it must be, and nothing was left."""
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    results, rows = [], []
    for name, fault in FAULTS.items():
        context.say(f"faults, {name}")
        outcome = fault.provoke(context.directory)
        rows.append(row(fault, outcome))
        complaints = fault.complaints(outcome)
        results.append(
            Result(
                name=f"faults: {fault.title}",
                ours=float(not complaints),
                peer=1.0,
                unit="as it must",
                ratio=float(not complaints),
                threshold=1.0,
                details={"sees": rows[-1][1], "left": rows[-1][2], "complaints": complaints},
            )
        )
    print("\n" + text(rows) + "\n", flush=True)
    return results


def row(fault: Fault, outcome: Outcome) -> Row:
    """What happens, what the user sees of it, what is left behind."""
    sees = outcome.seen
    if outcome.error is None:
        goes_on = "training goes on"
        goes_on += ", with wrong numbers" if outcome.weights == "wrong" else " to the same numbers"
        sees = "; ".join(filter(None, (sees.replace("\n", "; "), goes_on)))
    left = ", ".join(outcome.left) or "nothing"
    if outcome.weights != "right" or (outcome.error is not None and outcome.whole_steps):
        left += "; " + _WEIGHTS.get(outcome.weights, outcome.weights)
    if outcome.error is not None and outcome.whole_steps and outcome.states != "right":
        left += f"; state_dict() raises {outcome.states}"
    return fault.title, sees.replace("\n", "; "), left


def text(rows: Sequence[Row]) -> str:
    """For people: three columns, wrapped."""
    lines = []
    for cells in [("fault", "what the user sees", "what is left behind"), *rows]:
        columns = [textwrap.wrap(c, w) for c, w in zip(cells, _WIDTHS, strict=True)]
        for number in range(max(map(len, columns))):
            parts = [column[number] if number < len(column) else "" for column in columns]
            padded = [part.ljust(width) for part, width in zip(parts, _WIDTHS, strict=True)]
            lines.append("  ".join(padded).rstrip())
        lines.append("")
    return "\n".join(lines).rstrip()


def markdown(rows: Sequence[Row]) -> str:
    """The same for docs/faults.md."""
    cells = [("fault", "what the user sees", "what is left behind"), ("---",) * 3, *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in cells
    )


def main() -> int:
    """Provoke, print, and complain."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.io.faults",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--markdown", action="store_true", help="as in the documentation")
    options = parser.parse_args()
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    reason = why_not()
    if reason is not None:
        print(f"cannot be provoked here: {reason}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    rows, complaints = [], []
    with tempfile.TemporaryDirectory(prefix="faults-", dir=options.dir) as folder:
        for name in options.faults or FAULTS:
            fault = FAULTS[name]
            outcome = fault.provoke(Path(folder))
            rows.append(row(fault, outcome))
            complaints += [f"{name}: {complaint}" for complaint in fault.complaints(outcome)]
    print((markdown if options.markdown else text)(rows))
    print("\n".join(complaints), file=sys.stderr)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
