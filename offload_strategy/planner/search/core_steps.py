"""How long a step takes where the model computes on the cores that also update and move bytes.

The equations are those of `placed_steps` (Fuyou, section 4.5), with what is known of one set of
cores (`cost_model`, [Note: one set of cores]): there is no link; updates are computed in sequence
with the model, not beside it; each byte that moves takes a little computing time, and so does each
saved tensor that passes the hooks.

[Note: what an update costs beside itself]
With `overlap: commit` it runs on copies of weights, which are compared with the weights and copied
back in `step()`: four passes over the bytes of all weights, two of which only read. States in
bfloat16 are widened and rounded again, in the caches. Gradients of several micro-batches are added
up, which reads two tensors and writes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.planner.saved_tensor_bytes import layer_tensors
from offload_strategy.planner.search.choice import Choice, Placed
from offload_strategy.planner.search.cores import (
    ELEMENT_BYTES,
    HOOK_SECONDS,
    CpuRequest,
    moment_bytes,
)
from offload_strategy.planner.search.placed_steps import BACKWARD_OVER_FORWARD, PlacedStep, Stage
from offload_strategy.planner.search.placement import micro_work

#: In copies of the weights: of one before the update and one after it, with a look at the bits.
_COPIES_OF_COMMIT = 1.5
#: In copies of the weights: two moments, widened and rounded.
_COPIES_OF_ROUNDING = 1.0
_COPIES_OF_ADDING = 1.5


@dataclass(frozen=True, slots=True)
class _Work:
    """What one stage computes, in seconds, and moves, in bytes."""

    seconds: float = 0.0
    read: float = 0.0
    written: float = 0.0

    def __add__(self, other: _Work) -> _Work:
        return _Work(
            self.seconds + other.seconds, self.read + other.read, self.written + other.written
        )

    def stage(self, name: str, times: int, request: CpuRequest) -> Stage:
        moved = self.read + self.written
        return Stage(
            name,
            times,
            {
                "computation": self.seconds + request.cores.toll * moved,
                "paths": request.paths_seconds(self.read, self.written),
            },
        )


def core_step(request: CpuRequest, placed: Placed) -> PlacedStep:
    """Predict what a step takes.

    Args:
        request: model and machine.
        placed: what stays in memory, and what leaves it.
    """
    choice = placed.choice
    forward, backward = _passes(request, placed)
    update, commits = _update(request, placed)
    adding = _Work(_COPIES_OF_ADDING * request.cores.copy_seconds(request.shape.parameters))
    stages = [forward.stage("forward", choice.micro_batches, request)]
    if choice.micro_batches > 1:
        stages.append((backward + adding).stage("backward", choice.micro_batches - 1, request))
    if choice.moves_optimizer and choice.overlap != "off":
        stages.append((backward + update).stage("backward, update", 1, request))
        stages.append(commits.stage("step()", 1, request))
    else:
        stages.append(backward.stage("backward", 1, request))
        stages.append(update.stage("step()", 1, request))
    written = choice.micro_batches * forward.written + update.written + commits.written
    return PlacedStep(tuple(stages), written)


def computing_seconds(request: CpuRequest, choice: Choice) -> tuple[float, float]:
    """Forward and backward of a micro-batch, as if nothing moved.

    Args:
        request: model and machine.
        choice: of the settings.
    """
    shape, cores = request.shape, request.cores
    work = micro_work(request, choice)
    passes = 1 + BACKWARD_OVER_FORWARD
    beside = shape.layers * shape.layer_parameters * cores.pass_seconds / passes
    ends = cores.copy_seconds(shape.vocabulary * shape.hidden)
    forward = shape.forward_flops(work.batch, work.sequence) / cores.flops + beside
    share = choice.recomputed_layers / shape.layers
    again = choice.recomputed_layers * shape.layer_flops(work.batch, work.sequence) / cores.flops
    again += share * beside
    return forward, BACKWARD_OVER_FORWARD * forward + ends + again


def _passes(request: CpuRequest, placed: Placed) -> tuple[_Work, _Work]:
    """Forward and backward of a micro-batch."""
    choice = placed.choice
    forward, backward = computing_seconds(request, choice)
    left = placed.split("activations").ssd_bytes
    hooks = 0.0
    if left:
        whole = request.shape.layers - choice.recomputed_layers
        tensors = whole * len(layer_tensors(request.shape, micro_work(request, choice)))
        hooks = HOOK_SECONDS * (tensors + choice.recomputed_layers) / 2
    weights = placed.split("weights").ssd_bytes
    return (
        _Work(forward + hooks, read=weights, written=left),
        _Work(backward + hooks, read=weights + left),
    )


def _update(request: CpuRequest, placed: Placed) -> tuple[_Work, _Work]:
    """The update, and what `step()` does after one that ran in backward."""
    choice, cores, parameters = placed.choice, request.cores, request.shape.parameters
    seconds = parameters / cores.update_rate
    if not choice.moves_optimizer:
        return _Work(seconds), _Work()
    copy, weights = cores.copy_seconds(parameters), ELEMENT_BYTES * parameters
    if choice.state_dtype != "float32":
        seconds += _COPIES_OF_ROUNDING * copy
    moved = moment_bytes(choice) * parameters * placed.split("states").ssd_share
    update = _Work(seconds, read=moved, written=moved)
    streamed = weights if choice.moves_parameters else 0.0
    if choice.overlap != "commit":
        # In backward they are there anyway; afterwards they have to come once more.
        again = streamed if choice.overlap == "off" else 0.0
        return update + _Work(read=again, written=streamed), _Work()
    gradients = weights - placed.gradient_bytes
    waiting = 2 * weights - placed.split("waiting").host_bytes - gradients
    update += _Work(_COPIES_OF_COMMIT * copy, written=gradients + waiting)
    return update, _Work(_COPIES_OF_COMMIT * copy, read=waiting, written=streamed)
