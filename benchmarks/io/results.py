"""What a line reports, and what it is given to measure with."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """A line, or a peer of it, cannot run here; says why."""


@dataclass(frozen=True)
class Result:
    """One claim, and whether it holds.

    Args:
        name: of the line, and of the part of it.
        ours: our figure, a median.
        peer: the figure that it is compared with, a median.
        unit: of both.
        ratio: the median of the ratios of runs that followed each other.
        threshold: that the ratio must reach (`at_least`), or may reach at most.
        at_least: which of the two.
        command: what the peer ran.
        details: other figures, for the JSON.
        judged: False for figures that are shown for information.
    """

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    threshold: float
    at_least: bool = True
    command: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    judged: bool = True

    @property
    def held(self) -> bool:
        """Whether the ratio is on the right side of the threshold."""
        return self.ratio >= self.threshold if self.at_least else self.ratio <= self.threshold

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "held": self.held}


@dataclass
class Context:
    """What every line is given.

    Args:
        directory: an empty directory on the disk to be measured.
        repeats: alternations.
        quick: small and few, to see that everything runs; the figures mean little.
        say: tells what is going on.
    """

    directory: Path
    repeats: int
    quick: bool
    say: Callable[[str], None]
    #: What lines of one run share: searches for a peer's best settings, and measurements.
    shared: dict[str, Any] = field(default_factory=dict)


Line = Callable[[Context], Sequence[Result]]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of runs that followed each other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent * 10) // 1000) - 1)]


def alternating(names: Sequence[str], round_number: int) -> list[str]:
    """The contenders in an order that begins with another one in every round."""
    start = round_number % len(names)
    return [*names[start:], *names[:start]]


def table(rows: Sequence[Result]) -> str:
    """Rows as text, for people."""
    header = ("", "ours", "peer", "unit", "ratio", "must be", "")
    lines = [header]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        verdict = ("held" if row.held else "NOT HELD") if row.judged else "information"
        lines.append(
            (
                row.name,
                f"{row.ours:.4g}",
                f"{row.peer:.4g}",
                row.unit,
                f"{row.ratio:.3f}",
                f"{sign} {row.threshold:g}" if row.judged else "",
                verdict,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    left = (0, 3, 6)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of figures and words as a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    texts = ([f"{c:.4g}" if isinstance(c, float) else str(c) for c in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


def write_json(file: Path, machine: dict[str, Any], outcome: dict[str, Any]) -> None:
    """The machine, the options and every result."""
    file.write_text(json.dumps({"machine": machine, **outcome}, indent=2) + "\n")


def conclude(
    results: Sequence[Result], file: Path | None, machine: dict[str, Any], outcome: dict[str, Any]
) -> int:
    """Print the results, write them to a file if one is given; the status to end with.

    Args:
        results: of all lines.
        file: for JSON; None for none.
        machine: as `describe_machine` has it.
        outcome: what else goes into the file.

    Returns:
        1 if a result that is judged was not held, else 0.
    """
    print("\n" + table(results))
    if file is not None:
        rows = [result.as_dict() for result in results]
        write_json(file, machine, {**outcome, "results": rows})
    return int(any(result.judged and not result.held for result in results))
