"""What a run on a GPU needs, and its fastest step by Fuyou's equations (section 4.5).

`planner.step_time` has the equations. This module derives their inputs from the shape of the model
and the figures of the machine, and searches over the bytes D of activations that are offloaded
instead of recomputed.

[Note: the order of offloading]
The input of each layer is always offloaded (D_start). What is computed inside a layer is either
recomputed in backward or offloaded: first what costs most FLOP for a byte, "down" before the others
in a GPT (table 2). The result of attention is one more candidate here, because its FLOP grow with
the sequence. Every prefix of this order is tried. A decoder's cross-attention is always recomputed.

[Note: device memory of a step]
With streamed weights: two layers of weights, one in use and one on its way; the gradients of one
layer; embedding and head, which compute at both ends; what one layer saves while it computes
backward, its input and the gradient of that; logits and their gradient, for one sequence at a time
(a loss that is computed in chunks). With weights that stay: all of them instead of the two layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from offload_strategy.plan_runtime.space_requirements import optimizer_need
from offload_strategy.planner.host_memory_needs import host_memory
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import layer_activation_bytes, layer_input_bytes
from offload_strategy.planner.step_time import (
    BACKWARD_OVER_FORWARD,
    StepTime,
    limit_name,
    predict_step,
)

#: Bytes per parameter: float32 weights and both moments of Adam.
STATE_BYTES = 12
#: Bytes per parameter of weights, and of gradients, in half precision.
WEIGHT_BYTES = 2
#: Steps whose times differ by less than this share count as equally fast: less is offloaded then.
_SAME = 1e-9
_LAYERS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Swap:
    """Which results inside the layers are offloaded, and the step that this gives."""

    inner_bytes: int  # Bytes of these results
    checkpoint_bytes: int  # Bytes of the inputs of the layers, which are always offloaded
    all_bytes: int  # What `inner_bytes` would be if all results were offloaded
    flops: float  # FLOP that the device computes in the step, recomputation included
    time: StepTime  # Time of the step

    @property
    def coefficient(self) -> float:
        """Share of the results inside the layers that is offloaded (Fuyou, section 5.6)."""
        return self.inner_bytes / self.all_bytes

    @property
    def moved_bytes(self) -> int:
        """D: bytes that are written in forward and read in backward."""
        return self.inner_bytes + self.checkpoint_bytes

    def limit(self, stage: Literal["forward", "backward"]) -> str:
        """Name of the resource that limits a stage, such as "backward paths" or "update"."""
        return limit_name(stage, self.time.stage(stage).limit)


def swaps(request: Request, *, streams_weights: bool = True) -> Iterator[Swap]:
    """Try every amount of activations, the least first; see [Note: the order of offloading].

    With `streams_weights` weights are read from the paths in both passes, otherwise they stay on
    the device.
    """
    shape, work, flops = request.shape, request.work, request.flops
    ordered = sorted(
        shape.parts(work.batch, work.sequence, work.dtype_bytes),
        key=lambda part: part.flops_per_byte,
        reverse=True,
    )
    recomputed = shape.layers * shape.layer_flops(work.batch, work.sequence)
    inputs = shape.layers * layer_input_bytes(shape, work)
    everything = shape.layers * sum(part.output_bytes for part in ordered)
    forward = shape.forward_flops(work.batch, work.sequence) / flops
    parameters = shape.parameters
    weights = WEIGHT_BYTES * parameters
    moved = 0

    def swap() -> Swap:
        backward = BACKWARD_OVER_FORWARD * forward + max(0.0, recomputed) / flops
        time = predict_step(
            request.rates,
            forward_seconds=forward,
            backward_seconds=backward,
            update_seconds=parameters / request.updates,
            weights_bytes=weights if streams_weights else 0.0,
            gradients_bytes=weights,
            states_read_bytes=STATE_BYTES * parameters,
            states_written_bytes=STATE_BYTES * parameters,
            activations_bytes=inputs + moved,
        )
        return Swap(moved, inputs, everything, (forward + backward) * flops, time)

    yield swap()
    for part in ordered:
        for _ in range(shape.layers):
            moved += part.output_bytes
            recomputed -= part.flops
            yield swap()


def best_swap(
    request: Request, *, streams_weights: bool = True, room_bytes: float = math.inf
) -> Swap:
    """Return the fastest of `swaps`; of equally fast ones the smallest (equations 1 to 12).

    `room_bytes` is the room on the drives for activations. Inputs of layers are offloaded even if
    there is none.
    """
    candidates = swaps(request, streams_weights=streams_weights)
    best = next(candidates)
    for candidate in candidates:
        if candidate.moved_bytes > room_bytes:
            break
        if candidate.time.seconds < best.time.seconds * (1 - _SAME):
            best = candidate
    return best


@dataclass(frozen=True, slots=True)
class Fit:
    """Needed and available bytes of a limited resource."""

    what: str
    needed_bytes: int
    available_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is enough."""
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True)
class StepEstimate:
    """What a run needs, and its fastest step for which the drives have room."""

    request: Request

    def device_bytes(self, *, streams: bool) -> int:
        """Return the bytes of device memory; see [Note: device memory of a step]."""
        shape, work = self.request.shape, self.request.work
        layer = WEIGHT_BYTES * shape.layer_parameters
        weights = WEIGHT_BYTES * shape.parameters
        if streams:
            weights = _LAYERS_IN_FLIGHT * layer + WEIGHT_BYTES * shape.end_parameters
        stream = layer_input_bytes(shape, work)
        logits = work.sequence * shape.vocabulary * work.dtype_bytes
        return weights + layer + layer_activation_bytes(shape, work) + 2 * stream + 2 * logits

    @cached_property
    def streams_weights(self) -> bool:
        """Whether weights are streamed because they do not fit on the device."""
        return self.device_bytes(streams=False) > self.request.device.memory_bytes

    @cached_property
    def states_bytes(self) -> int:
        """Bytes of states, their updates until `step()`, and streamed weights."""
        weights = WEIGHT_BYTES * self.request.shape.parameters
        states = optimizer_need(STATE_BYTES * self.request.shape.parameters, weights, "commit")
        return states + (weights if self.streams_weights else 0)

    @cached_property
    def swap(self) -> Swap:
        """What is offloaded, and the time of a step by part."""
        room = self.request.drives.capacity_bytes - self.states_bytes
        return best_swap(self.request, streams_weights=self.streams_weights, room_bytes=room)

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        """Needed and available memory and disk."""
        request = self.request
        device = self.device_bytes(streams=self.streams_weights)
        host = sum(host_memory(request.shape, "streamed").values())
        disk = self.states_bytes + self.swap.moved_bytes
        return (
            Fit("device memory", device, request.device.memory_bytes),
            Fit("host memory", host, request.host_memory_bytes),
            Fit("disk", disk, request.drives.capacity_bytes),
        )

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.swap.time.seconds

    @property
    def tokens_per_second(self) -> float:
        """Throughput in tokens per second."""
        return self.request.work.tokens / self.seconds
