"""How long a step takes with tensors in host memory and on drives, in several micro-batches.

The equations are Fuyou's (section 4.5): a stage takes as long as the slowest of computation, link
and paths. Beyond `cost_model.predict_step` there are host memory as a tier, which costs the link
but no path; micro-batches, of which the last alone has the update; and the update on the device,
where this package runs it, so that states cross the link.

[Note: stages of a step]
    forward             of each micro-batch: weights come, activations leave
    backward            of each but the last: weights and activations come
    backward, update    of the last: gradients leave; states come and leave within it, or after it
                        with overlap: off
    step()              with overlap: commit new weights come from where they waited
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_strategy.planner.request import Request
from offload_strategy.planner.search.choice import Placed
from offload_strategy.planner.search.placement import micro_work
from offload_strategy.planner.step_estimate import WEIGHT_BYTES
from offload_strategy.planner.step_time import Rates

#: Backward over forward computation (Fuyou, equation 8).
BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a step.

    Args:
        name: as in [Note: stages of a step].
        times: how often it comes in a step.
        limits: seconds of "computation", "link" and "paths", each as if it were alone.
    """

    name: str
    times: int
    limits: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Of one time: the slowest of all."""
        return max(self.limits.values())

    @property
    def limit(self) -> str:
        """What is the slowest."""
        return max(self.limits, key=lambda name: self.limits[name])


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step and its stages.

    Args:
        stages: in order.
        written_bytes: to the drives.
    """

    stages: tuple[Stage, ...]
    written_bytes: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(stage.times * stage.seconds for stage in self.stages)

    @property
    def limits(self) -> dict[str, float]:
        """Seconds of the stages that each limits: "computation", "link" and "paths"."""
        found: dict[str, float] = {}
        for stage in self.stages:
            seconds = stage.times * stage.seconds
            if seconds:
                found[stage.limit] = found.get(stage.limit, 0.0) + seconds
        return found

    @property
    def limit(self) -> str:
        """What limits most of the step."""
        found = self.limits
        return max(found, key=lambda name: found[name])


@dataclass(frozen=True, slots=True)
class _Moves:
    """Bytes to and from the device and the drives in one stage."""

    up: float = 0.0
    down: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: _Moves) -> _Moves:
        return _Moves(
            self.up + other.up,
            self.down + other.down,
            self.read + other.read,
            self.written + other.written,
        )

    def stage(self, name: str, times: int, computation: float, rates: Rates) -> Stage:
        limits = {
            "computation": computation,
            "link": max(self.up, self.down) / rates.link,
            "paths": rates.paths_seconds(self.read, self.written),
        }
        return Stage(name, times, limits)


def _fetch(nbytes: float, ssd_share: float) -> _Moves:
    return _Moves(up=nbytes, read=nbytes * ssd_share)


def _send(nbytes: float, ssd_share: float) -> _Moves:
    return _Moves(down=nbytes, written=nbytes * ssd_share)


def placed_step(request: Request, placed: Placed) -> PlacedStep:
    """Predict what a step takes; see [Note: stages of a step].

    Args:
        request: model and machine.
        placed: where its tensors lie.
    """
    choice, shape = placed.choice, request.shape
    work = micro_work(request, choice)
    rates, flops = request.machine().rates, request.flops
    forward = shape.forward_flops(work.batch, work.sequence) / flops
    again = choice.recomputed_layers * shape.layer_flops(work.batch, work.sequence) / flops
    backward = BACKWARD_OVER_FORWARD * forward + again

    activations = placed.split("activations")
    activations_out = _send(activations.total_bytes, activations.ssd_share)
    activations_in = _fetch(activations.total_bytes, activations.ssd_share)
    weights = placed.split("weights")
    weights_in = _fetch(weights.total_bytes, weights.ssd_share)
    passes_forward = weights_in + activations_out
    passes_backward = weights_in + activations_in
    update, commits = _update(request, placed)
    stages = [passes_forward.stage("forward", choice.micro_batches, forward, rates)]
    if choice.micro_batches > 1:
        rest = choice.micro_batches - 1
        stages.append(passes_backward.stage("backward", rest, backward, rates))
    if choice.moves_optimizer and choice.overlap == "off":
        stages.append(passes_backward.stage("backward", 1, backward, rates))
        stages.append(update.stage("update", 1, 0.0, rates))
    else:
        both = passes_backward + update
        stages.append(both.stage("backward, update", 1, backward, rates))
    stages.append(commits.stage("step()", 1, 0.0, rates))
    written = choice.micro_batches * activations_out.written + update.written + commits.written
    return PlacedStep(tuple(stages), written)


def _update(request: Request, placed: Placed) -> tuple[_Moves, _Moves]:
    """What the update moves, and what `step()` moves after it."""
    choice = placed.choice
    if not choice.moves_optimizer:
        return _Moves(), _Moves()
    parameters = request.shape.parameters
    states, states_share = choice.state_bytes * parameters, placed.split("states").ssd_share
    update = _fetch(states, states_share) + _send(states, states_share)
    weights, weights_share = WEIGHT_BYTES * parameters, placed.split("weights").ssd_share
    commits = _Moves()
    if choice.overlap == "commit":
        waits = placed.split("waiting").ssd_share
        # Gradients, and new weights.
        update += _send(2 * weights, waits)
        if choice.moves_parameters:
            # From where they wait to where the old ones are.
            commits = _Moves(read=weights * waits, written=weights * weights_share)
        else:
            commits = _fetch(weights, waits)
    elif choice.moves_parameters:
        update += _send(weights, weights_share)
        if choice.overlap == "off":
            # In backward they are there anyway; afterwards they have to come once more.
            update += _fetch(weights, weights_share)
    return update, commits
