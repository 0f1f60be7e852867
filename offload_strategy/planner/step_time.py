"""The one model of how long a step takes: Fuyou's equations (section 4.5), stage by stage.

In every stage of a step, computation, the link to the device and the paths run at the same time,
and the stage takes as long as the slowest of them (`planner.search.search_model` has the stages).
On the CPU updates are added to what computes, and computation loses some time for each byte that
moves, at a rate of the machine that has to be measured (`Rates.io_overhead`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Way = Literal["to_device", "from_device", "read", "written", "exchanged"]

#: Seconds of backward for each second of forward computation (Fuyou, equation 8).
BACKWARD_OVER_FORWARD = 2.0


class StageLoad(NamedTuple):
    """Seconds of computation of a stage, and bytes over the link, of paths, and between ranks."""

    computation: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    read: float = 0.0
    written: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: StageLoad) -> StageLoad:  # type: ignore[override]
        return StageLoad(*map(operator.add, self, other))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step, which occurs `times` times."""

    name: str
    times: int
    load: StageLoad
    # Seconds that each resource ("computation", "link", "paths", and "collectives" of several
    # ranks) would take if it were the only one
    limits: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of one occurrence: those of the slowest resource."""
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        """The slowest resource."""
        return max(self.limits, key=self.limits.__getitem__)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step by stage, in order."""

    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole step (equation 1)."""
        return sum(stage.times * stage.seconds for stage in self.stages)

    def moved_bytes(self, *ways: Way) -> float:
        """Bytes that the step moves in these ways, as `StageLoad` names them."""
        loads = ((stage.times, getattr(stage.load, way)) for stage in self.stages for way in ways)
        total: float = sum(times * nbytes for times, nbytes in loads)
        return total

    @property
    def limited_seconds(self) -> dict[str, float]:
        """Seconds of the stages that each resource limits, by resource."""
        found: dict[str, float] = {}
        for stage in self.stages:
            if seconds := stage.times * stage.seconds:
                found[stage.limit] = found.get(stage.limit, 0.0) + seconds
        return found

    @property
    def limit(self) -> str:
        """The resource that limits most of the step."""
        found = self.limited_seconds
        return max(found, key=found.__getitem__)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine moves, in bytes per second."""

    read: float  # Read rate of all paths together
    write: float  # Write rate of all paths together
    link: float = math.inf  # Between host and device in each direction; infinite on the CPU
    io_overhead: float = 0.0  # Seconds of computation lost for each byte that a path moves
    # Whether a path reads and writes at its rates at the same time; otherwise both share its time
    duplex: bool = False
    collectives: float = math.inf  # What each rank sends and receives; infinite for one rank

    def stage(self, name: str, load: StageLoad, times: int = 1) -> Stage:
        """Return the stage that a load makes."""
        read, written = load.read / self.read, load.written / self.write
        limits = {
            "computation": load.computation + self.io_overhead * (load.read + load.written),
            "link": max(load.to_device, load.from_device) / self.link,
            "paths": max(read, written) if self.duplex else read + written,
        }
        if math.isfinite(self.collectives):
            limits["collectives"] = load.exchanged / self.collectives
        return Stage(name, times, load, limits)
