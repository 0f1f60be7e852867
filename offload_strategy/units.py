"""Sizes in bytes and counts of parameters, as text and as numbers; lengths of time; Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

SECONDS_PER_DAY = 86400.0
SECONDS_PER_YEAR = 365.0 * SECONDS_PER_DAY

PAGE_BYTES = 4096
"""Alignment of every extent and host buffer: direct I/O and memory maps work in whole pages."""

_BINARY = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_DECIMAL = {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_SIZE_UNITS = {name.lower(): factor for name, factor in {"B": 1, **_DECIMAL, **_BINARY}.items()}
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2, "b": 1000**3, "g": 1000**3}
_NUMBER_AND_UNIT = re.compile(
    r"([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*)", re.I
)


def parse_size(value: str | int | float) -> int:
    """Read bytes: a whole number, or text with a unit in any case, such as "1.5 GiB".

    Units are B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB and TiB (powers of 1024); a fraction
    of a byte is rounded. Raises a ValueError that names the value and the units.
    """
    number, unit = _split(value, "a size such as '512MiB' or a number of bytes")
    if unit not in _SIZE_UNITS and unit != "":
        letter = unit[0].upper()
        if unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
            raise ValueError(
                f"{value!r} leaves the unit open: write {letter}iB (powers of 1024) or "
                f"{letter}B (powers of 1000)"
            )
        raise ValueError(
            f"{value!r} has the unknown unit {unit!r}: use {', '.join(['B', *_DECIMAL, *_BINARY])}"
        )
    if unit == "" and number.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return round(number * _SIZE_UNITS.get(unit, 1))


def parse_count(value: str | int | float) -> int:
    """Read a number of parameters: a whole number, or text with K, M or B, such as "100M".

    Raises a ValueError if it is not a whole number, 0 or more.
    """
    number, unit = _split(value, "a number of parameters such as 100000000 or '100M'")
    if unit not in _COUNT_UNITS:
        raise ValueError(f"{value!r} has the unknown unit {unit!r}: use K, M or B")
    number *= _COUNT_UNITS[unit]
    if number.denominator != 1:
        raise ValueError(f"{value!r} is not a whole number of parameters")
    return int(number)


def format_size(size: int | float) -> str:
    """Write bytes for people: "512 MiB", or "1.5 GiB" with one decimal where it is needed."""
    unit, factor = "B", 1
    for name, value in _BINARY.items():
        # 1023.95 KiB would round to "1024 KiB": the next unit starts where rounding reaches it.
        if abs(size) >= value - value / KiB / 20:
            unit, factor = name, value
    text = f"{size / factor:.1f}".removesuffix(".0")
    return f"{text} {unit}"


def exact_size(size: int) -> str | int:
    """Write bytes so that `parse_size` gives the same number back: "512MiB", or the bare number."""
    for name, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{name}"
    return size


def round_up(size: int, multiple: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def markdown_table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown with a head such as "name | seconds"."""
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def markdown_list(title: str, items: Iterable[object]) -> str:
    """Return a title and a list in Markdown."""
    return "\n".join([f"{title}:\n", *(f"- {item}" for item in items)])


def _split(value: str | int | float, wanted: str) -> tuple[Fraction, str]:
    """Split into an exact number and a unit in lower case."""
    is_given = isinstance(value, str | int | float)
    match = _NUMBER_AND_UNIT.fullmatch(str(value).strip()) if is_given else None
    if match is None:  # also for True, nan and inf
        raise ValueError(f"{value!r} is not {wanted}")
    number, unit = Fraction(match[1].replace("_", "")), match[2].lower()
    if number < 0:
        raise ValueError(f"{value!r} is negative: give {wanted}")
    return number, unit
