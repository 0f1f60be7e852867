"""Memory and space that training needs, known before its first step."""

from __future__ import annotations

from offload_strategy.config.value_types import Overlap

#: Subgroups in buffers at a time: one is read, one updated, one written, and one is ready.
SUBGROUPS_IN_FLIGHT = 4
#: Parameters of a subgroup if memory allows: few enough that the first update starts early and that
#: several subgroups in memory do not count, and enough that I/O requests and updates are efficient.
_FEWEST_PARAMETERS, MOST_PARAMETERS = 1 << 18, 1 << 22
#: From host memory an accelerator updates the most of them sooner than the host launches that.
MOST_FROM_MEMORY = 1 << 24
#: With `commit` on the CPU each update takes more of the cores that compute: within a limit of
#: memory, half as many updates made a step 4 % shorter. Without one, their buffers raise the peak.
MOST_TO_COMMIT_ON_CPU = 1 << 23
_SUBGROUPS_PER_OPTIMIZER = 16
_SMALLEST_SUBGROUP = 1 << 16


def subgroup_size(parameters: int, each: float, memory: int, *, most: int = MOST_PARAMETERS) -> int:
    """Return how many parameters to update at a time if the config does not say; a power of two.

    Of an optimizer with so many parameters, `each` with so many bytes of states and copies, where
    the buffers of all subgroups in flight may take `memory` bytes, and `most` parameters at most.
    """
    size = min(most, max(_FEWEST_PARAMETERS, parameters // _SUBGROUPS_PER_OPTIMIZER))
    size = 1 << (size.bit_length() - 1)
    while size > _SMALLEST_SUBGROUP and SUBGROUPS_IN_FLIGHT * each * size > memory:
        size //= 2
    return size


def optimizer_need(states_bytes: int, weights_bytes: int, overlap: Overlap) -> int:
    """Return the bytes that an optimizer's tickets take on their tiers at most.

    With `commit`, old states stay until the new ones become current at `step()`, and new weights
    wait next to them: twice the states, and once the weights. Gradients may come on top.
    """
    return 2 * states_bytes + weights_bytes if overlap == "commit" else states_bytes
