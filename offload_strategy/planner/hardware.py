"""Devices and drives by name, each figure with its source.

The figures are in hardware.yaml in this folder. Names are matched leniently: case, dots and dashes
do not matter, a manufacturer may be left out, and "4xP5510" means four drives.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, cast

import yaml

from offload_strategy.errors import ConfigError
from offload_strategy.units import SECONDS_PER_YEAR, parse_size

#: Bytes that can be written for each rated byte: as the manufacturer rates, on which the warranty
#: depends; with large sequential writes instead of the random ones of the rating; and as SSDTrain
#: assumes, sequential writes of data that need not stay readable for years, but for a day.
SSDTRAIN = 2.5 * 86.0
WEARS = {
    "as rated": 1.0,
    "sequential writes (rated at WAF 2.5)": 2.5,
    "and data kept for a day (86 times the cycles)": SSDTRAIN,
}

#: "4xP5510": an x within a name, as in "wd-sn850x-2tb", does not follow a number that begins it.
_COUNT = re.compile(r"\s*(?:([+-]?[\d.,]+)\s*[x×*]\s*)?(\S.*?)\s*", re.I)
_MAKERS = ("nvidia", "tesla", "geforce", "samsung", "intel", "micron", "wd")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; None stands for figures that no source has."""

    name: str  # Name in hardware.yaml
    flops: float  # Peak of dense float16 or bfloat16 in FLOP/s
    memory_bytes: int  # Memory of the device
    link: float  # Bytes per second between host and device in each direction
    sustained_flops: float | None = None  # Measured FLOP/s of a transformer block
    measured_link: float | None = None  # Measured bytes per second of pinned copies
    sources: Mapping[str, str] = field(default_factory=dict)  # Of figures, by field


@dataclass(frozen=True, slots=True)
class Drive:
    """An SSD, or several that are striped; None stands for figures that no source has."""

    name: str  # Name in hardware.yaml
    read: float  # Sequential read rate in bytes per second
    write: float  # Sequential write rate in bytes per second
    capacity_bytes: int  # Capacity
    endurance_bytes: float | None = None  # Rated endurance over its life
    writes_per_day: int | None = None  # Bytes that may be written in a day, if there is a limit
    sources: Mapping[str, str] = field(default_factory=dict)  # Of figures, by field

    def times(self, count: int) -> Drive:
        """Return so many of these drives, striped."""
        names = ("read", "write", "capacity_bytes", "endurance_bytes")
        more = {name: count * each for name in names if (each := getattr(self, name)) is not None}
        return replace(self, name=f"{count} x {self.name}", **more)

    def lifespan_years(self, step_seconds: float, written_bytes: float) -> dict[str, float]:
        """Return how long they last by assumption of wear; empty if their rating is not known."""
        if (rated := self.endurance_bytes) is None:
            return {}
        return {
            name: lifespan_seconds(rated, step_seconds, written_bytes, wear) / SECONDS_PER_YEAR
            for name, wear in WEARS.items()
        }


def lifespan_seconds(
    endurance_bytes: float, step_seconds: float, written_bytes: float, wear: float = 1.0
) -> float:
    """Return the seconds until drives wear out (SSDTrain, section III-D); inf without writes."""
    return endurance_bytes * wear * step_seconds / written_bytes if written_bytes else math.inf


def device(name: str) -> Device:
    """Look up a device, or raise a ConfigError that names similar ones."""
    return cast(Device, _look_up(name, "device"))


def device_called(name: str) -> Device | None:
    """Return the device that a driver calls so, as "NVIDIA H100 80GB HBM3"; None if not known."""
    key, devices = _key(name), table("device")
    near = max((one for one in devices if key.startswith(one)), key=len, default=None)
    return None if near is None or "laptop" in key else devices[near]


def drive_set(text: str) -> Drive:
    """Read "P5510" or "4xP5510", or raise a ConfigError that says what is wrong."""
    if (match := _COUNT.fullmatch(text)) is None:
        raise ConfigError(f"{text!r} names no drive: write a name, or a count as in '4xP5510'")
    count, name = match.groups("1")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"{text!r} asks for {count} drives: the count is a whole number from 1 on, as in "
            f"'4x{name}'"
        )
    return cast(Drive, _look_up(name, "drive")).times(int(count))


@functools.cache
def table(kind: str) -> dict[str, Any]:
    """Return the entries of a kind, "device" or "drive", by everything that they are called."""
    maker: Any = {"device": Device, "drive": Drive}[kind]
    text = resources.files(__package__).joinpath("hardware.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found: dict[str, Any] = {}
    for name, row in data[f"{kind}s"].items():
        names = map(str, (name, *row.pop("aliases")))
        # FLOP/s are no bytes, but a number without a unit, which `parse_size` reads as it is.
        figures = {key: parse_size(value) for key, (value, _) in row.items()}
        sources = {key: data["sources"][source] for key, (_, source) in row.items()}
        found |= dict.fromkeys(map(_key, names), maker(name, **figures, sources=sources))
    return found


def _key(name: str) -> str:
    words = [word for word in re.split(r"[\s_\-]+", name.lower()) if word not in _MAKERS]
    return re.sub(r"(\d)gi?b\b", r"\1g", "".join(words).replace(".", ""))


def _look_up(name: str, kind: str) -> Any:
    entries = table(kind)
    if (found := entries.get(_key(name))) is not None:
        return found
    near = difflib.get_close_matches(_key(name), entries, 3, cutoff=0.5)
    nearest = list(dict.fromkeys(entries[key].name for key in near))
    nearest = nearest or sorted({entry.name for entry in entries.values()})
    raise ConfigError(
        f"there is no {kind} {name!r} in the hardware table; the nearest are "
        f"{', '.join(nearest)}. Give one of these, or its figures by hand"
    )
