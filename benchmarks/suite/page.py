"""The page of results, made from files of figures and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.parts import PARTS

#: A step above this share of what it could take at best has its cause named.
NEAR = 1.3
#: Ratios of two runs that differ by more than this share are marked.
SAME = 0.1
#: What is told of a machine, by its name in the figures.
_MACHINE = ("cores", "memory", "kernel", "python", "torch", "disk", "allocator")

Figures = Mapping[str, Any]


def write_page(figures: Path, page: Path, second: Path | None = None) -> None:
    """Write a page.

    Args:
        figures: directory with a JSON file for each part that ran.
        page: to write, in Markdown.
        second: likewise, of a second run; may be empty.
    """
    found = _read(figures)
    again = {} if second is None else _read(second)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(_page(found, again, figures, page)) + "\n")


def _read(folder: Path) -> dict[str, Figures]:
    return {
        part.name: json.loads(file.read_text())
        for part in PARTS
        if (file := folder / f"{part.name}.json").exists()
    }


def _page(
    found: Mapping[str, Figures], again: Mapping[str, Figures], figures: Path, page: Path
) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield "Written by `python -m benchmarks.suite` (`make bench`) from the figures in"
    yield f"`{_relative_path(figures, page)}`. Each contender runs in its own process, and they"
    yield "alternate. Figures are medians of rounds; compare ratios within one run only."
    yield ""
    claims = [claim for part in found.values() for claim in part.get("results", ())]
    judged = [claim for claim in claims if claim["judged"]]
    if judged:
        held = sum(claim["held"] for claim in judged)
        yield f"**{held} of {len(judged)} claims hold.** The others are marked."
        yield ""
    pairs = [
        pair for name, part in found.items() for pair in _twice(part, again.get(name, {})).values()
    ]
    if pairs:
        close = sum(abs(change) <= SAME for _, change in pairs)
        yield f"Of {len(pairs)} ratios that were measured in two runs {close} are within"
        yield f"{SAME:.0%} of each other; the others are marked."
        yield ""
    for part in PARTS:
        yield f"## {part.title}"
        yield ""
        if part.note:
            yield part.note
            yield ""
        if part.name not in found:
            own = f" by itself (`python -m benchmarks.suite --only {part.name}`)"
            how = own if part.asked else f" here (`python {' '.join(part.command(quick=False))}`)"
            yield f"Not run{how}."
            yield ""
            continue
        yield from _part(part.name, found[part.name], again.get(part.name, {}), figures, page)
    yield from _roofline(found)


def _twice(first: Figures, second: Figures) -> dict[str, tuple[float, float]]:
    """By claim the second run's ratio, and by which share it is away from the first one's."""
    ratios = {one["name"]: one["ratio"] for one in second.get("results", ())}
    return {
        one["name"]: (ratio, ratio / one["ratio"] - 1)
        for one in first.get("results", ())
        if one["ratio"] and (ratio := ratios.get(one["name"])) is not None
    }


def _part(name: str, figures: Figures, again: Figures, folder: Path, page: Path) -> Iterator[str]:
    machine = figures.get("machine", {})
    yield ", ".join(f"{key}: {machine[key]}" for key in _MACHINE if key in machine) + "."
    yield ""
    for title, text in _texts(figures):
        if title:
            yield f"### {title}"
            yield ""
        yield text.strip()
        yield ""
    picture = folder / f"{name}.svg"
    if picture.exists():
        yield f"![{name}]({_relative_path(picture, page)})"
        yield ""
    if figures.get("results"):
        yield from _claims(figures["results"], _twice(figures, again))
        yield ""
    for verb in ("skipped", "failed"):
        for line, why in (figures.get(verb) or {}).items():
            yield f"{verb}: {line}: {_first_line(why)}"
            yield ""


def _texts(figures: Figures) -> Iterator[tuple[str, str]]:
    """Tables that a benchmark has written as text."""
    if "table" in figures:
        yield "", str(figures["table"])
    for title, text in (figures.get("texts") or {}).items():
        yield str(title), str(text)


def _claims(results: Sequence[Figures], again: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    yield f"| claim | ours | peer | unit | ratio | must be | |{' second run |' * bool(again)}"
    yield f"|---|---|---|---|---|---|---|{'---|' * bool(again)}"
    for one in results:
        bound = f"{'≥' if one['at_least'] else '≤'} {one['threshold']:g}" if one["judged"] else ""
        verdict = ("held" if one["held"] else "**not held**") if one["judged"] else ""
        yield (
            f"| {one['name']} | {one['ours']:.4g} | {one['peer']:.4g} | {one['unit']} "
            f"| {one['ratio']:.3f} | {bound} | {verdict} |{_second(one['name'], again)}"
        )


def _second(claim: str, again: Mapping[str, tuple[float, float]]) -> str:
    if not again:
        return ""
    if claim not in again:
        return " |"
    ratio, change = again[claim]
    away = "" if abs(change) <= SAME else f", **{change:+.0%}**"
    return f" {ratio:.3f}{away} |"


def _roofline(found: Mapping[str, Figures]) -> Iterator[str]:
    """How far each of ours is from what its machine could do."""
    asked = {part.name for part in PARTS if part.asked}
    rows = [
        {**row, "name": f"{row['name']} ({name})"} if name in asked else row
        for name, part in found.items()
        for row in part.get("roofline", ())
    ]
    yield "## Distance from the roofline"
    yield ""
    yield "The shortest possible step is the longer of computation (plain PyTorch's step in the"
    yield "same round) and the bytes at the bandwidth measured in that round, one direction after"
    yield f"the other. Above {NEAR:g} the cause is named."
    yield ""
    yield "| | step, s | shortest, s | ratio | limited by | cause |"
    yield "|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda one: -one["distance"]):
        cause = row.get("cause", "") if row["distance"] > NEAR else ""
        yield (
            f"| {row['name']} | {row['seconds']:.3f} | {row['best']:.3f} | {row['distance']:.2f} "
            f"| {row['limit']} | {cause} |"
        )


def _relative_path(file: Path, page: Path) -> str:
    """A path as seen from the page."""
    try:
        return str(file.resolve().relative_to(page.resolve().parent))
    except ValueError:
        return file.name


def _first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
