"""What will be needed, compared with what is there, before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offload_strategy.units import format_size

#: Offload is called needless when what it moves would fit this many times into free memory.
_COMFORT = 2


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """Bytes that the optimizer's tickets will take on their tiers at most."""

    states_bytes: int
    in_flight_bytes: int

    @property
    def total_bytes(self) -> int:
        """Their sum."""
        return self.states_bytes + self.in_flight_bytes


def optimizer_need(
    states_bytes: int,
    weights_bytes: int,
    overlap: Literal["commit", "eager", "off"],
    gradients_bytes: int = 0,
) -> SpaceNeed:
    """Region for optimizer states.

    With `commit`, old states stay until the new ones are current at `step()`, and new weights wait
    beside them: twice the states and once the weights, and the gradients that memory has no room
    for.

    Args:
        states_bytes: states of all attached parameters.
        weights_bytes: the parameters themselves.
        overlap: the configured overlap.
        gradients_bytes: gradients that wait for `step()` in the tiers.
    """
    ahead = states_bytes + weights_bytes + gradients_bytes if overlap == "commit" else 0
    return SpaceNeed(states_bytes, ahead)


def shortfall(need: SpaceNeed, available_bytes: int) -> str | None:
    """Say by how much the tiers are too small, or None if they are not."""
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
    """Say by how much the tiers are too small for streamed weights, or None if they are not.

    Args:
        weights_bytes: of the weights that have no place there yet.
        available_bytes: what their tiers have left.
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
    """One line for somebody who does not need offload here, or None if they may.

    Args:
        moved_bytes: saved tensors of one step plus optimizer states.
        free_bytes: free memory of the device that trains.
    """
    if moved_bytes <= 0 or moved_bytes * _COMFORT > free_bytes:
        return None
    return (
        f"offload is not needed here: the {format_size(moved_bytes)} that it moves would fit into "
        f"the {format_size(free_bytes)} of memory that are free"
    )
