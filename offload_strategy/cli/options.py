"""Commands and options of the command line from tables, and checks of what they name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload_strategy.errors import ConfigError
from offload_strategy.units import PAGE_BYTES, parse_size

#: The option with a word for its value, if it has one; its help; and what else argparse needs.
Option = tuple[str, str] | tuple[str, str, dict[str, Any]]


def rate(unit: float = 1.0, most: float = math.inf) -> Callable[[str], float]:
    """Return the type of an option that is a number of units above 0, up to `most`."""
    limit = "" if most == math.inf else f" and at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0{limit}")
        return unit * value

    return parse


def size(text: str) -> int:
    """Parse a size of at least a page."""
    try:
        found = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < PAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a page of {PAGE_BYTES} bytes")
    return found


#: Types of values by the word that stands for them in the help; others are text.
_TYPES = {"N": int, "X": float, "GB/s": rate(1e9), "FILE": Path, "SIZE": size}


def add_options(parser: Any, options: Iterable[Option]) -> None:
    """Add options to a parser or a group of one."""
    for words, text, *more in options:
        flags = [word for word in words.split() if word.startswith("--")] or [words]
        value = words.removeprefix(" ".join(flags)).strip()
        usual: dict[str, Any] = {"metavar": value, "type": _TYPES.get(value, str)}
        if not value:
            usual = {} if more else {"action": "store_true"}
        parser.add_argument(*flags, help=text, **(usual | dict(*more)))


class Command(NamedTuple):
    """A command of `ssd-offload`; `run` returns the exit status, or None for 0."""

    name: str
    run: Callable[[argparse.Namespace], int | None]
    help: str
    options: Sequence[Option] = ()
    description: str | None = None
    groups: Mapping[str, Sequence[Option]] = {}  # More options, by the title of their group

    def add_to(self, commands: Any) -> None:
        """Add it to the subparsers of `ssd-offload`, or of one of its commands."""
        parser = commands.add_parser(self.name, help=self.help, description=self.description)
        for title, options in self.groups.items():
            add_options(parser.add_argument_group(title), options)
        add_options(parser, self.options)
        parser.set_defaults(run=self.run, parser=parser)


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return those of the options that were given, by name; 0 counts as given."""
    values = {name: getattr(options, name) for name in names}
    return {name: one for name, one in values.items() if one is not None and one is not False}


def flags(names: Iterable[str]) -> str:
    """Return the names of options as they are written."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise a ConfigError that names those of the options that were given."""
    if found := given(options, *names):
        raise ConfigError(f"{flags(found)}: {why}")
