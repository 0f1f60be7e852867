"""Devices, drives and hosts by name, each figure with its source.

The figures are in hardware.yaml in this folder. Names are matched leniently: case, dots and dashes
do not matter, a manufacturer may be left out, and "4xP5510" means four drives.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

import yaml

from offload_strategy.errors import ConfigError
from offload_strategy.units import parse_size

_GB = 1e9
_TB = 1e12
_DAYS_PER_YEAR = 365.0
_COUNT = re.compile(r"\s*(?:(?P<count>[^\sx×*]+)\s*[x×*]\s*)?(?P<name>\S.*?)\s*", re.I)
_MAKERS = ("nvidia", "geforce", "samsung", "intel", "micron", "wd")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU.

    Args:
        name: Name in hardware.yaml.
        flops: Peak of dense float16 or bfloat16 in FLOP/s.
        memory_bytes: Memory of the device.
        link: Bytes per second between host and device in each direction.
        sustained_flops: Measured FLOP/s of a transformer block; None if no source has it.
        measured_link: Measured bytes per second of pinned copies; None if no source has it.
        price: Price in US dollars; None if no source has it.
        sources: Source of each figure, by field.
    """

    name: str
    flops: float
    memory_bytes: int
    link: float
    sustained_flops: float | None
    measured_link: float | None
    price: float | None
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drive:
    """An SSD.

    Args:
        name: Name in hardware.yaml.
        read: Sequential read rate in bytes per second.
        write: Sequential write rate in bytes per second.
        capacity_bytes: Capacity.
        endurance_bytes: Rated endurance over its life; None if no source has it.
        price: Price in US dollars; None if no source has it.
        sources: Source of each figure, by field.
    """

    name: str
    read: float
    write: float
    capacity_bytes: int
    endurance_bytes: float | None
    price: float | None
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drives:
    """Several drives of one kind that are striped.

    Args:
        drive: The drive.
        count: Number of drives, at least 1.
    """

    drive: Drive
    count: int

    @property
    def capacity_bytes(self) -> int:
        """Capacity of all drives."""
        return self.count * self.drive.capacity_bytes

    @property
    def endurance_bytes(self) -> float | None:
        """Rated endurance of all drives; None if the rating is not known."""
        each = self.drive.endurance_bytes
        return None if each is None else self.count * each

    def __str__(self) -> str:
        """Count and name."""
        return f"{self.count} x {self.drive.name}"


@dataclass(frozen=True, slots=True)
class Host:
    """A host that a paper measured.

    Args:
        name: Name in hardware.yaml.
        memory_bytes: Host memory.
        update_rate: Parameters that Adam updates on its cores in a second; None if not known.
        price: Price in US dollars without devices and drives; None if no source has it.
        sources: Source of each figure, by field.
    """

    name: str
    memory_bytes: int
    update_rate: float | None
    price: float | None
    sources: Mapping[str, str]


def devices() -> dict[str, Device]:
    """Return all known devices by name."""
    return dict(_tables().devices)


def drives() -> dict[str, Drive]:
    """Return all known drives by name."""
    return dict(_tables().drives)


def hosts() -> dict[str, Host]:
    """Return all known hosts by name."""
    return dict(_tables().hosts)


def device(name: str) -> Device:
    """Look up a device.

    Raises:
        ConfigError: If there is none of this name; the message names similar ones.
    """
    return _look_up(name, _tables().devices, "device")


def host(name: str) -> Host:
    """Look up a host of a paper.

    Raises:
        ConfigError: If there is none of this name; the message names similar ones.
    """
    return _look_up(name, _tables().hosts, "host")


def drive_set(text: str) -> Drives:
    """Read "P5510" or "4xP5510".

    Raises:
        ConfigError: If there is no such drive, or the count is not a positive integer.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} names no drive: write a name, or a count as in '4xP5510'")
    names = _tables().drives
    count, name = match["count"], match["name"]
    if count is None or _key(text) in _keys(names):
        return Drives(_look_up(text, names, "drive"), 1)
    # "wd-sn850x-2tb" and "P5800X" contain an x: a count must be a number.
    if not re.fullmatch(r"[+-]?[\d.,]+", count):
        return Drives(_look_up(text, names, "drive"), 1)
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(
            f"{text!r} asks for {count} drives: the count is a whole number from 1 on, as in "
            f"'4x{name}'"
        )
    return Drives(_look_up(name, names, "drive"), int(count))


@dataclass(frozen=True, slots=True)
class _Tables:
    devices: dict[str, Device]
    drives: dict[str, Drive]
    hosts: dict[str, Host]


_Entry = TypeVar("_Entry", Device, Drive, Host)


@functools.cache
def _data() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("hardware.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


@functools.cache
def _tables() -> _Tables:
    data = _data()
    explained = data["sources"]
    return _Tables(
        {name: _device(_Row(name, row, explained)) for name, row in data["devices"].items()},
        {name: _drive(_Row(name, row, explained)) for name, row in data["drives"].items()},
        {name: _host(_Row(name, row, explained)) for name, row in data["hosts"].items()},
    )


class _Row:
    """One entry of hardware.yaml, read figure by figure."""

    def __init__(self, name: str, row: dict[str, Any], explained: dict[str, str]) -> None:
        self.name = name
        self._row = row
        self.sources = {key: explained[cell[1]] for key, cell in row.items() if key != "aliases"}

    def scaled(self, key: str, factor: float = 1.0) -> float | None:
        return float(self._row[key][0]) * factor if key in self._row else None

    def needed(self, key: str, factor: float) -> float:
        return float(self._row[key][0]) * factor

    def size(self, key: str) -> int:
        return parse_size(self._row[key][0])


def _device(row: _Row) -> Device:
    return Device(
        name=row.name,
        flops=row.needed("tflops", 1e12),
        memory_bytes=row.size("memory"),
        link=row.needed("link_GBps", _GB),
        sustained_flops=row.scaled("sustained_tflops", 1e12),
        measured_link=row.scaled("measured_link_GBps", _GB),
        price=row.scaled("price"),
        sources=row.sources,
    )


def _drive(row: _Row) -> Drive:
    endurance = row.scaled("endurance_tbw", _TB)
    per_day, years = row.scaled("drive_writes_per_day"), row.scaled("rated_years")
    if endurance is None and per_day is not None and years is not None:
        endurance = per_day * row.size("capacity") * years * _DAYS_PER_YEAR
    return Drive(
        name=row.name,
        read=row.needed("read_GBps", _GB),
        write=row.needed("write_GBps", _GB),
        capacity_bytes=row.size("capacity"),
        endurance_bytes=endurance,
        price=row.scaled("price"),
        sources=row.sources,
    )


def _host(row: _Row) -> Host:
    return Host(
        name=row.name,
        memory_bytes=row.size("memory"),
        update_rate=row.scaled("update_parameters_per_second"),
        price=row.scaled("price"),
        sources=row.sources,
    )


@functools.cache
def _aliases() -> dict[str, str]:
    found = {}
    for kind in ("devices", "drives", "hosts"):
        for name, row in _data()[kind].items():
            for alias in [name, *row.get("aliases", ())]:
                found[_key(str(alias))] = name
    return found


def _key(name: str) -> str:
    """Return a normalized name."""
    words = [word for word in re.split(r"[\s_\-]+", name.lower()) if word not in _MAKERS]
    return re.sub(r"(\d)gi?b\b", r"\1g", "".join(words).replace(".", ""))


def _keys(names: Iterable[str]) -> set[str]:
    wanted = set(names)
    return {key for key, name in _aliases().items() if name in wanted}


def _look_up(name: str, table: dict[str, _Entry], what: str) -> _Entry:
    found = _aliases().get(_key(name))
    if found in table:
        return table[found]
    keys = {key: _aliases()[key] for key in _keys(table)}
    near = difflib.get_close_matches(_key(name), keys, 3, cutoff=0.5)
    nearest = list(dict.fromkeys(keys[key] for key in near)) or sorted(table)
    raise ConfigError(
        f"there is no {what} {name!r} in the hardware table; the nearest are "
        f"{', '.join(nearest)}. Give one of these, or its figures by hand"
    )
