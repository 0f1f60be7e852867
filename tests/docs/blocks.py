"""Fenced code blocks of a Markdown page, and what a reader does with them.

A block with a title is a file that the reader saves under that name. A block of `console` is typed:
lines after `$ ` are commands, and the others are what they print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

_FENCE = re.compile(r"^( *)```(\S+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
#: A figure and its unit; also a version, and a number in hexadecimal or with an exponent.
_FIGURE = re.compile(
    r"0x[\da-f.]+p[-+]\d+|-?\d[\d.,:]*(?:e[-+]?\d+)?(?: ?(?:[KMGT]i?B(?:/s)?|[mµ]?s|h|B|%)\b)?"
)


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language, the name to save it under, and its text."""

    place: str
    language: str
    title: str | None
    text: str


@dataclass(frozen=True)
class Typed:
    """A command, and the lines that the page shows of its output."""

    command: str
    shown: list[str]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, also those inside of tabs and notes."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        title = _TITLE.search(match[3])
        code = dedent(match[4])
        yield Block(f"{page.name}:{line}", match[2], title[1] if title else None, code)


def typed_in(block: Block) -> Iterator[Typed]:
    """Yield the commands of a block of `console`, with the output that the page shows."""
    lines = block.text.splitlines()
    while lines:
        first = lines.pop(0)
        assert first.startswith("$ "), f"{block.place}: {first!r} follows no command"
        command = first[2:]
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        shown = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        yield Typed(command, shown)


def without_figures(line: str) -> str:
    """Replace what differs between two runs or machines, and spaces that line columns up."""
    return re.sub(r"[ \-]{2,}", " ", _FIGURE.sub("#", line)).strip()


def missing(shown: list[str], printed: str) -> list[str]:
    """Return the lines that were not printed, in this order and figures aside.

    The page may leave lines out, or the end of a line, and says so with `...`.
    """
    remaining = iter([without_figures(line) for line in printed.splitlines()])
    wanted = [line for line in shown if line.strip() not in ("", "...")]
    return [line for line in wanted if not any(_matches(line, each) for each in remaining)]


def _matches(shown: str, printed: str) -> bool:
    wanted = without_figures(shown.removesuffix("..."))
    return printed.startswith(wanted) if shown.endswith("...") else printed == wanted
