"""The one model of how long a step takes: Fuyou's equations (section 4.5), stage by stage.

In every stage of a step, computation, the link to the device and the paths run at the same time,
and the stage takes as long as the slowest of them. `predict_step` lays a step out as Fuyou does,
with the update on the host within the backward pass; the search for settings lays out stages of its
own (`planner.search.gpu_model`, `planner.search.cpu_model`) from the same parts.

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

#: Seconds of backward for each second of forward computation (Fuyou, equation 8).
BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What one stage of a step computes and moves; loads can be added.

    Args:
        computation: Seconds of computation.
        to_device: Bytes that cross the link to the device.
        from_device: Bytes that cross the link from the device.
        read: Bytes that are read from the paths.
        written: Bytes that are written to the paths.
    """

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
    """One stage of a step.

    Args:
        name: For example "forward" or "backward".
        times: How often the stage occurs in a step.
        limits: Seconds that each resource ("computation", "link", "paths", "update") would take
            if it were the only one.
    """

    name: str
    times: int
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
    """The time of a step.

    Args:
        stages: The stages, in order.
        written_bytes: Bytes that the step writes to the paths.
    """

    stages: tuple[Stage, ...]
    written_bytes: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step (equation 1)."""
        return sum(stage.times * stage.seconds for stage in self.stages)

    def stage(self, name: str) -> Stage:
        """Return the first stage of this name.

        Raises:
            StopIteration: If no stage has this name.
        """
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
    """What a machine moves, in bytes per second.

    Args:
        read: Read rate of one path.
        write: Write rate of one path.
        paths: Number of paths.
        link: Rate between host and device in each direction; infinite if the model trains on the
            CPU.
        shared_cores: Whether the model runs on the cores that run the optimizer; see
            [Note: one set of cores].
        io_overhead: Seconds of computation that are lost for each byte that a path moves. It
            counts with `shared_cores` only.
        duplex: Whether a path reads and writes at its rates at the same time; otherwise reads and
            writes share its time.
    """

    read: float
    write: float
    paths: int = 1
    link: float = math.inf
    shared_cores: bool = False
    io_overhead: float = 0.0
    duplex: bool = False

    def paths_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the seconds that the paths need to move so many bytes."""
        read, written = read_bytes / self.read, written_bytes / self.write
        return (max(read, written) if self.duplex else read + written) / self.paths

    def stage(
        self, name: str, load: StageLoad, times: int = 1, update: float | None = None
    ) -> Stage:
        """Return the stage that a load makes.

        Args:
            name: Name of the stage.
            load: What the stage computes and moves.
            times: How often the stage occurs in a step.
            update: Seconds of an optimizer update on the host that runs within the stage, if any.
        """
        computation = load.computation
        if self.shared_cores:
            computation += (update or 0.0) + self.io_overhead * (load.read + load.written)
        limits = {"computation": computation}
        if update is not None:
            limits["update"] = update
        limits["link"] = max(load.to_device, load.from_device) / self.link
        limits["paths"] = self.paths_seconds(load.read, load.written)
        return Stage(name, times, limits)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a step computes and moves, in seconds and bytes.

    Args:
        forward_seconds: Computation of the forward pass.
        update_seconds: Computation of the optimizer over all parameters, copies included.
        backward_seconds: Computation of the backward pass; None for twice the forward pass.
        recompute_seconds: Computation of activations that are neither kept nor offloaded.
        weights_bytes: Weights that are read from the paths in each of both passes and written back
            after the update; 0 if they stay on the device.
        gradients_bytes: Gradients that go from the device to the host.
        states_read_bytes: Optimizer states that are read from the paths.
        states_written_bytes: Optimizer states that are written to the paths.
        activations_bytes: Activations that are written in the forward pass and read in backward.
    """

    forward_seconds: float
    update_seconds: float
    backward_seconds: float | None = None
    recompute_seconds: float = 0.0
    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    states_read_bytes: float = 0.0
    states_written_bytes: float = 0.0
    activations_bytes: float = 0.0

    @property
    def backward_computation(self) -> float:
        """Seconds of the backward pass, recomputation included (equation 8)."""
        backward = self.backward_seconds
        if backward is None:
            backward = BACKWARD_OVER_FORWARD * self.forward_seconds
        return backward + self.recompute_seconds


def predict_step(profile: StepProfile, rates: Rates) -> StepTime:
    """Predict the stages "forward" and "backward" of a step (equations 1 to 8).

    Args:
        profile: What the step computes and moves.
        rates: What the machine moves in a second.
    """
    weights, activations = profile.weights_bytes, profile.activations_bytes
    forward = StageLoad(
        profile.forward_seconds, weights, activations, read=weights, written=activations
    )
    backward = StageLoad(
        profile.backward_computation,
        to_device=weights + activations,
        from_device=profile.gradients_bytes,
        read=profile.states_read_bytes + weights + activations,
        written=profile.states_written_bytes + weights,
    )
    stages = (
        rates.stage("forward", forward),
        rates.stage("backward", backward, update=profile.update_seconds),
    )
    return StepTime(stages, forward.written + backward.written)
