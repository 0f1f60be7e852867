"""How many parameters an optimizer had best update at a time."""

from __future__ import annotations

#: Subgroups in buffers at a time: read, updated, written, and one ready.
SUBGROUPS_IN_FLIGHT = 4

#: Where memory allows it: few enough that the first update starts early and several in memory at a
#: time do not count, and enough that a read or write is worth a request, and an update its calls.
_RANGE = (1 << 18, 1 << 22)
_SHARE = 16
_SMALLEST = 1 << 16


def subgroup_size(parameters: int, each: float, memory: int) -> int:
    """Parameters of a subgroup where nobody says how many; a power of two.

    Args:
        parameters: of the optimizer.
        each: bytes of states and copies for one of them.
        memory: bytes that the buffers of all subgroups in flight may take.
    """
    low, high = _RANGE
    size = min(high, max(low, parameters // _SHARE))
    size = 1 << (size.bit_length() - 1)
    while size > _SMALLEST and SUBGROUPS_IN_FLIGHT * each * size > memory:
        size //= 2
    return size
