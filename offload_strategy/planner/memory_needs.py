"""Device memory, host memory and disk that a run needs, compared with what the machine has.

[Note: device memory of a step]
With streamed weights: two layers of weights, one in use and one on its way; the gradients of one
layer; embedding and head, which compute at both ends; what one layer saves while it computes
backward, its input and the gradient of that; logits and their gradient, for one sequence at a time
(a loss that is computed in chunks). With weights that stay: all of them instead of the two layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload_strategy.plan_runtime.space_requirements import optimizer_need
from offload_strategy.planner.host_memory_needs import host_memory
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import (
    checkpoint_bytes,
    layer_activation_bytes,
)
from offload_strategy.planner.step_estimate import STATE_BYTES, WEIGHT_BYTES, Swap, best_swap

_LAYERS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Fit:
    """Needed and available bytes of a limited resource.

    Args:
        what: Name of the resource.
        needed_bytes: Bytes that the run needs.
        available_bytes: Bytes that the machine has.
    """

    what: str
    needed_bytes: int
    available_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is enough."""
        return self.needed_bytes <= self.available_bytes


def device_bytes(request: Request, *, streams: bool) -> int:
    """Return the bytes of device memory; see [Note: device memory of a step].

    Args:
        request: The run.
        streams: Whether weights are streamed through the device.
    """
    shape, work = request.shape, request.work
    layer = WEIGHT_BYTES * shape.layer_parameters
    ends = WEIGHT_BYTES * (1 if shape.tied else 2) * shape.vocabulary * shape.hidden
    weights = _LAYERS_IN_FLIGHT * layer + ends if streams else WEIGHT_BYTES * shape.parameters
    stream = checkpoint_bytes(shape, work) // shape.layers
    logits = work.sequence * shape.vocabulary * work.dtype_bytes
    return weights + layer + layer_activation_bytes(shape, work) + 2 * stream + 2 * logits


def streams_weights(request: Request) -> bool:
    """Return whether the weights are too large to stay on the device."""
    return device_bytes(request, streams=False) > request.device.memory_bytes


def states_bytes(request: Request, *, streams: bool) -> int:
    """Return the bytes of states, their updates until `step()`, and streamed weights.

    Args:
        request: The run.
        streams: Whether weights are streamed through the device.
    """
    weights = WEIGHT_BYTES * request.shape.parameters
    states = optimizer_need(STATE_BYTES * request.shape.parameters, weights, "commit")
    return states + (weights if streams else 0)


def planned_swap(request: Request, *, streams: bool) -> Swap:
    """Return the best step for which the drives have room.

    Args:
        request: The run.
        streams: Whether weights are streamed through the device.
    """
    room = request.drives.capacity_bytes - states_bytes(request, streams=streams)
    return best_swap(
        request.shape,
        request.work,
        request.machine(),
        streams_weights=streams,
        room_bytes=room,
    )


def fits(request: Request, swap: Swap, streams: bool) -> tuple[Fit, ...]:
    """Compare what a run needs with what there is."""
    return (
        Fit("device memory", device_bytes(request, streams=streams), request.device.memory_bytes),
        Fit(
            "host memory",
            host_memory(request.shape, "streamed").peak_bytes,
            request.host_memory_bytes,
        ),
        Fit(
            "disk",
            states_bytes(request, streams=streams) + swap.moved_bytes,
            request.drives.capacity_bytes,
        ),
    )
