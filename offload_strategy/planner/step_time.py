"""How long a step takes: Fuyou's equations (section 4.5), as a pure function.

Computation, the link to the device and the paths run at the same time, and the slowest of them is
what a stage takes. A path is simplex: what is read and what is written share its time. The link is
duplex.

[Note: one set of cores]
The equations are for a device that runs the model beside a host that runs the optimizer, so the
two overlap. A model that computes on the host itself shares its cores with the optimizer: there
the update hides behind nothing, and its seconds are added to those of the backward pass. And what
moves to and from the paths is not free for it: threads that move bytes take turns on its cores, and
a virtual disk may copy with them. Computation loses some time for each byte, a rate of the machine
that has to be measured (`Rates.toll`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Backward over forward, where the backward pass was not measured (equation 8).
_BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What a step computes and moves.

    Args:
        forward_seconds: computation of the forward pass.
        update_seconds: computation of the optimizer over all parameters, copies included.
        backward_seconds: computation of the backward pass; None for twice the forward pass.
        recompute_seconds: computation of activations that are neither kept nor moved.
        weights_bytes: weights that come from the paths in each of both passes, and leave to them
            after the update; 0 where they stay on the device.
        gradients_bytes: gradients that go from the device to the host.
        states_read_bytes: optimizer states that are read from the paths.
        states_written_bytes: optimizer states that are written to them.
        activations_bytes: activations that are written to the paths in the forward pass, and read
            in the backward pass.
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
        """Seconds of the backward pass with what it computes again (equation 8)."""
        backward = self.backward_seconds
        if backward is None:
            backward = _BACKWARD_OVER_FORWARD * self.forward_seconds
        return backward + self.recompute_seconds


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine moves, in bytes per second.

    Args:
        read: from one path.
        write: to one path.
        paths: how many there are.
        link: between host and device, in each direction; infinite where the model computes on the
            host.
        shared_cores: whether the model computes on the cores that run the optimizer; see
            [Note: one set of cores].
        toll: seconds that computation loses for a byte that a path moves meanwhile, where the
            model computes on the host.
    """

    read: float
    write: float
    paths: int = 1
    link: float = math.inf
    shared_cores: bool = False
    toll: float = 0.0

    def paths_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """What the paths take for so many bytes; one direction after the other."""
        return (read_bytes / self.read + written_bytes / self.write) / self.paths


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of both stages of a step: the update runs within the backward pass.

    Args:
        forward: of the forward pass.
        backward: of the backward pass and the update.
        limits: what would be the time of each stage if it were alone: "forward computation",
            "forward link", "forward paths", "backward computation", "update", "backward link" and
            "backward paths".
    """

    forward: float
    backward: float
    limits: dict[str, float]

    @property
    def step(self) -> float:
        """Both (equation 1)."""
        return self.forward + self.backward


def predict_step(profile: StepProfile, rates: Rates) -> StepTime:
    """Predict what a step takes (equations 1 to 8).

    Args:
        profile: what it computes and moves.
        rates: what the machine moves in a second.
    """
    weights, activations = profile.weights_bytes, profile.activations_bytes
    states = profile.states_read_bytes + profile.states_written_bytes
    toll = rates.toll if rates.shared_cores else 0.0
    limits = {
        "forward computation": profile.forward_seconds + toll * (weights + activations),
        "forward link": max(weights, activations) / rates.link,
        "forward paths": rates.paths_seconds(weights, activations),
        "backward computation": profile.backward_computation
        + toll * (2 * weights + activations + states),
        "update": profile.update_seconds,
        "backward link": max(profile.gradients_bytes, weights + activations) / rates.link,
        "backward paths": rates.paths_seconds(
            profile.states_read_bytes + weights + activations,
            profile.states_written_bytes + weights,
        ),
    }
    forward = max(seconds for name, seconds in limits.items() if name.startswith("forward"))
    computations = (limits["backward computation"], limits["update"])
    backward = max(
        sum(computations) if rates.shared_cores else max(computations),
        limits["backward link"],
        limits["backward paths"],
    )
    return StepTime(forward, backward, limits)
