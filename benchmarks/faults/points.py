"""The trainings of `every_operation`, and the points of each: one operation that fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import operations, subject
from offload_strategy.units import KiB

_CLIENTS = {"activations": "activations", "states": "optimizer", "weights": "parameters"}


@dataclass(frozen=True)
class Setting:
    """What a training is configured with.

    Args:
        overlap: of the optimizer's updates.
        what: "activations", "states", "weights" or "all".
        tiers: "ssd", or "dram+ssd", where a part of it fits into host memory.
        checksum: how blocks are verified; "off", "sampled" or "full".
        direct: whether files are opened for direct I/O where possible.
        ranks: 1, or 2 that share the path; the operations that fail are those of one of them.
        encrypted: whether what is on the path is encrypted.
        raw: whether the path is a block device without a file system, which needs root.
        device: where the model trains; "sim" is the simulated accelerator of the tests.
    """

    overlap: str
    what: str
    tiers: str = "ssd"
    checksum: str = "off"
    direct: bool = True
    ranks: int = 1
    raw: bool = False
    encrypted: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        parts = [self.overlap, self.what, self.tiers]
        parts += [self.checksum] * (self.checksum != "off") + ["buffered"] * (not self.direct)
        parts += ["2ranks"] * (self.ranks == 2) + ["raw"] * self.raw
        parts += ["encrypted"] * self.encrypted
        return "-".join(parts if self.device == "cpu" else [*parts, self.device])

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that `str` gives such a name; raises ValueError if there is none."""
        found = {str(setting): setting for setting in (*SETTINGS, *OTHERS)}
        if text not in found:
            raise ValueError(f"there is no configuration {text!r}; one of {', '.join(found)}")
        return found[text]

    def config(self, place: Path) -> dict[str, Any]:
        """The config of an engine whose path is a directory."""
        io = {"checksum": self.checksum, "encryption": self.encrypted}
        config = subject.settings(place, io={**io, "direct": "auto" if self.direct else False})
        if self.tiers == "dram+ssd":
            memory = {"name": "memory", "kind": "dram", "capacity": 96 * KiB}
            config["tiers"].insert(0, memory)
        config["optimizer"] = {"subgroup_size": 12_000, "overlap": self.overlap}
        config["io"]["block_size"] = "32KiB"
        config["parameters"] = {"min_size": 1}
        for what, section in _CLIENTS.items():
            config[section]["enabled"] = self.what in (what, "all")
        return config


def _settings() -> Iterator[Setting]:
    for tiers, checksum in (("ssd", "off"), ("ssd", "sampled"), ("dram+ssd", "off")):
        for overlap in ("commit", "eager", "off"):
            yield Setting(overlap, "states", tiers, checksum)
            yield Setting(overlap, "all", tiers, checksum)
        yield Setting("off", "activations", tiers, checksum)
        yield Setting("off", "weights", tiers, checksum)
    yield Setting("commit", "all", direct=False)
    for overlap in ("commit", "eager", "off"):
        yield Setting(overlap, "all", "dram+ssd", "full")
        yield Setting(overlap, "all", checksum="sampled", ranks=2)


#: Those that not every machine can have: with cryptography, root, or the tests' accelerator.
OTHERS = (
    Setting("eager", "all", encrypted=True),
    Setting("commit", "all", raw=True),
    Setting("commit", "all", device="sim"),
    Setting("eager", "all", device="sim"),
)
#: Overlap modes matter where states are offloaded.
SETTINGS = tuple(_settings())


@dataclass(frozen=True)
class Point:
    """One operation of one training: the `number`-th of its `kind`, once or for good."""

    setting: Setting
    kind: str
    number: int
    for_good: bool

    def __str__(self) -> str:
        how = "for-good" if self.for_good else "once"
        return f"{self.setting}:{self.kind.replace(' ', '-')}.{self.number}:{how}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """The point that `str` gives such a name; raises ValueError if it is none."""
        try:
            setting, operation, how = text.split(":")
            kind, number = operation.rsplit(".", 1)
            kind = {name.replace(" ", "-"): name for name in operations.KINDS}[kind]
            for_good = {"once": False, "for-good": True}[how]
            return cls(Setting.parse(setting), kind, int(number), for_good)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{text!r} is not CONFIG:KIND.N:once or :for-good ({error}); kinds are "
                f"{', '.join(kind.replace(' ', '-') for kind in operations.KINDS)}"
            ) from error


#: With ranks, whose points take ten times as long: the first of each kind, then every fifth.
_FIRST, _EVERY = 4, 5
#: Failures of these are as good as unnoticed; for good they fail from the first one only.
_ADVICE = {"flags", "mode", "advise", operations.ADVISE_MEMORY, operations.LOOK}


def points(setting: Setting, counts: Mapping[str, int]) -> Iterator[Point]:
    """All points of a configuration, whose training makes so many operations of each kind."""
    for kind in operations.KINDS:
        for number in range(1, counts.get(kind, 0) + 1):
            if setting.ranks > 1 and number > _FIRST and number % _EVERY:
                continue
            yield Point(setting, kind, number, for_good=False)
            if kind not in _ADVICE or number == 1:
                yield Point(setting, kind, number, for_good=True)
