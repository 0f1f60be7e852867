"""The one model of how long a step takes: Fuyou's equations (section 4.5), stage by stage.

In every stage of a step, computation, the link to the device and the paths run at the same time,
and the stage takes as long as the slowest of them. `predict_step` lays a step out as Fuyou does,
with the update on the host within the backward pass; the search for settings lays out stages of its
own (`planner.search.gpu_model`, `planner.search.cpu_model`) from the same parts. A replay
(`plan_runtime.replay`) is exact to the tensor, but needs a profile, and seconds where the search
tries thousands of settings.

[Note: one set of cores]
Fuyou's equations are for a GPU that runs the model next to a host that runs the optimizer, so both
overlap. A model that trains on the CPU shares its cores with the optimizer: the update hides behind
nothing, and its seconds are added to those of the backward pass. I/O is not free for it either:
threads that move bytes take time from the same cores, and a virtual disk may copy with them. So
computation loses some time for each byte that moves, at a rate of the machine that has to be
measured (`Rates.io_overhead`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Way = Literal["to_device", "from_device", "read", "written"]

#: Seconds of backward for each second of forward computation (Fuyou, equation 8).
BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Seconds of computation of a stage, and bytes over the link and of the paths."""

    computation: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: StageLoad) -> StageLoad:
        return StageLoad(
            self.computation + other.computation,
            self.to_device + other.to_device,
            self.from_device + other.from_device,
            self.read + other.read,
            self.written + other.written,
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step, which occurs `times` times.

    `limits` has the seconds that each resource ("computation", "link", "paths", "update") would
    take if it were the only one.
    """

    name: str
    times: int
    load: StageLoad
    limits: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of one occurrence: those of the slowest resource."""
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        """The slowest resource."""
        return max(self.limits, key=lambda name: self.limits[name])


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
    def written_bytes(self) -> float:
        """Bytes that the step writes to the paths."""
        return self.moved_bytes("written")

    def stage(self, name: str) -> Stage:
        """Return the first stage of this name, or raise StopIteration."""
        return next(stage for stage in self.stages if stage.name == name)

    @property
    def resource_seconds(self) -> dict[str, float]:
        """Seconds of every resource in every stage, for example under "backward paths"."""
        return {
            limit_name(stage.name, resource): seconds
            for stage in self.stages
            for resource, seconds in stage.limits.items()
        }

    @property
    def limited_seconds(self) -> dict[str, float]:
        """Seconds of the stages that each resource limits, by resource."""
        found: dict[str, float] = {}
        for stage in self.stages:
            seconds = stage.times * stage.seconds
            if seconds:
                found[stage.limit] = found.get(stage.limit, 0.0) + seconds
        return found

    @property
    def limit(self) -> str:
        """The resource that limits most of the step."""
        found = self.limited_seconds
        return max(found, key=lambda name: found[name])


def limit_name(stage: str, resource: str) -> str:
    """Return "backward paths" and the like; the update occurs once and needs no stage."""
    return resource if resource == "update" else f"{stage} {resource}"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine moves, in bytes per second."""

    read: float  # Read rate of one path
    write: float  # Write rate of one path
    paths: int = 1  # Number of paths
    # Rate between host and device in each direction; infinite if the model trains on the CPU
    link: float = math.inf
    # Whether the model runs on the cores that run the optimizer; see [Note: one set of cores]
    shared_cores: bool = False
    # Seconds of computation that are lost for each byte that a path moves. It counts with
    # `shared_cores` only
    io_overhead: float = 0.0
    # Whether a path reads and writes at its rates at the same time; otherwise reads and
    # writes share its time
    duplex: bool = False

    def paths_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the seconds that the paths need to move so many bytes."""
        read, written = read_bytes / self.read, written_bytes / self.write
        return (max(read, written) if self.duplex else read + written) / self.paths

    def stage(
        self, name: str, load: StageLoad, times: int = 1, update: float | None = None
    ) -> Stage:
        """Return the stage that a load makes.

        `update` are the seconds of an optimizer update on the host that runs within it, if any.
        """
        computation = load.computation
        if self.shared_cores:
            computation += (update or 0.0) + self.io_overhead * (load.read + load.written)
        limits = {"computation": computation}
        if update is not None:
            limits["update"] = update
        limits["link"] = max(load.to_device, load.from_device) / self.link
        limits["paths"] = self.paths_seconds(load.read, load.written)
        return Stage(name, times, load, limits)


def predict_step(
    rates: Rates,
    *,
    forward_seconds: float,
    backward_seconds: float,
    update_seconds: float,
    weights_bytes: float = 0.0,
    gradients_bytes: float = 0.0,
    states_read_bytes: float = 0.0,
    states_written_bytes: float = 0.0,
    activations_bytes: float = 0.0,
) -> StepTime:
    """Predict the stages "forward" and "backward" of a step (equations 1 to 8).

    Seconds are those of computation: of backward with what is recomputed, of the update with its
    copies. Weights are read from the paths in both passes and written after the update, and
    gradients go from the device to the host; 0 bytes where they stay. Activations are written in
    the forward pass and read in backward.
    """
    forward = StageLoad(
        forward_seconds,
        weights_bytes,
        activations_bytes,
        read=weights_bytes,
        written=activations_bytes,
    )
    backward = StageLoad(
        backward_seconds,
        to_device=weights_bytes + activations_bytes,
        from_device=gradients_bytes,
        read=states_read_bytes + weights_bytes + activations_bytes,
        written=states_written_bytes + weights_bytes,
    )
    return StepTime(
        (rates.stage("forward", forward), rates.stage("backward", backward, update=update_seconds))
    )
