"""Space that states and weights need, checked before the first step, and the size of subgroups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_strategy.units import format_size

#: Subgroups in buffers at a time: one is read, one updated, one written, and one is ready.
SUBGROUPS_IN_FLIGHT = 4
#: Offload is reported as unnecessary if what it moves would fit this many times into free memory.
_FREE_MEMORY_FACTOR = 2
#: Parameters of a subgroup if memory allows: few enough that the first update starts early and that
#: several subgroups in memory do not count, and enough that I/O requests and updates are efficient.
_SUBGROUP_RANGE = (1 << 18, 1 << 22)
_SUBGROUPS_PER_OPTIMIZER = 16
_SMALLEST_SUBGROUP = 1 << 16


def subgroup_size(parameters: int, each: float, memory: int) -> int:
    """Return how many parameters to update at a time if the config does not say; a power of two.

    Args:
        parameters: Number of parameters of the optimizer.
        each: Bytes of states and copies for one parameter.
        memory: Bytes that the buffers of all subgroups in flight may take.
    """
    low, high = _SUBGROUP_RANGE
    size = min(high, max(low, parameters // _SUBGROUPS_PER_OPTIMIZER))
    size = 1 << (size.bit_length() - 1)
    while size > _SMALLEST_SUBGROUP and SUBGROUPS_IN_FLIGHT * each * size > memory:
        size //= 2
    return size


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """Bytes that the optimizer's tickets take on their tiers at most.

    Args:
        states_bytes: Bytes of current states.
        in_flight_bytes: Bytes of updates that wait for `step()`.
    """

    states_bytes: int
    in_flight_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of both."""
        return self.states_bytes + self.in_flight_bytes


def optimizer_need(
    states_bytes: int,
    weights_bytes: int,
    overlap: Literal["commit", "eager", "off"],
    gradients_bytes: int = 0,
) -> SpaceNeed:
    """Return the space that an optimizer needs on its tiers.

    With `commit`, old states stay until the new ones become current at `step()`, and new weights
    wait next to them: twice the states, once the weights, and the gradients that memory has no room
    for.

    Args:
        states_bytes: States of all attached parameters.
        weights_bytes: The parameters themselves.
        overlap: The configured overlap.
        gradients_bytes: Gradients that wait for `step()` in the tiers.
    """
    ahead = states_bytes + weights_bytes + gradients_bytes if overlap == "commit" else 0
    return SpaceNeed(states_bytes, ahead)


def shortfall(need: SpaceNeed, available_bytes: int) -> str | None:
    """Return a message if the tiers are too small for the states, otherwise None."""
    missing = need.total_bytes - available_bytes
    if missing <= 0:
        return None
    detail = f"{format_size(need.states_bytes)} of states"
    if need.in_flight_bytes:
        detail += (
            f" and {format_size(need.in_flight_bytes)} of updates on their way (overlap: commit)"
        )
    return (
        f"optimizer states need {format_size(need.total_bytes)} ({detail}), but its tiers have "
        f"{format_size(available_bytes)}: {format_size(missing)} too little. Raise a tier's "
        f"capacity, add a tier, or set optimizer.overlap to off, which needs less."
    )


def weights_shortfall(weights_bytes: int, available_bytes: int) -> str | None:
    """Return a message if the tiers are too small for streamed weights, otherwise None.

    Args:
        weights_bytes: Bytes of the weights that are not on the tiers yet.
        available_bytes: Free bytes of their tiers.
    """
    missing = weights_bytes - available_bytes
    if missing <= 0:
        return None
    return (
        f"the weights need {format_size(weights_bytes)}, but their tiers have "
        f"{format_size(available_bytes)}: {format_size(missing)} too little. Raise a tier's "
        f"capacity, or add a tier to parameters.tiers."
    )


def spare_memory_advice(moved_bytes: int, free_bytes: int) -> str | None:
    """Return a line for users who do not need offload here, otherwise None.

    Args:
        moved_bytes: Bytes of the saved tensors of one step and of the optimizer states.
        free_bytes: Free memory of the device that trains.
    """
    if moved_bytes <= 0 or moved_bytes * _FREE_MEMORY_FACTOR > free_bytes:
        return None
    return (
        f"offload is not needed here: the {format_size(moved_bytes)} that it moves would fit into "
        f"the {format_size(free_bytes)} of memory that are free"
    )
