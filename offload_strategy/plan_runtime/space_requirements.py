"""Memory and space that training needs, known before its first step.

[Note: memory at the peak]
The peak of training with streamed weights is in backward, while a block in the middle of the model
computes. Outside of buffers there are activations in use, gradients that no update has used yet,
and what the process had before. In buffers there are the weights of the blocks in flight; the
states of the parameter that is being updated and of the next subgroup; with `commit`, new weights
that wait for `step()`; prefetched activations; and idle buffers that are kept for the next request.
``memory.pinned`` bounds the sum of all buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_strategy.units import MiB, format_size, markdown_table

Overlap = Literal["commit", "eager", "off"]

#: Subgroups in buffers at a time: one is read, one updated, one written, and one is ready.
SUBGROUPS_IN_FLIGHT = 4
#: Parameters of a subgroup if memory allows: few enough that the first update starts early and that
#: several subgroups in memory do not count, and enough that I/O requests and updates are efficient.
_SUBGROUP_RANGE = (1 << 18, 1 << 22)
_SUBGROUPS_PER_OPTIMIZER = 16
_SMALLEST_SUBGROUP = 1 << 16
#: Libraries, thread stacks and kernel workspaces that the first step adds.
_FIRST_STEP_BYTES = 38 * MiB
#: Prefetched activations.
_AHEAD_BYTES = 32 * MiB


def subgroup_size(parameters: int, each: float, memory: int) -> int:
    """Return how many parameters to update at a time if the config does not say; a power of two.

    Of an optimizer with so many parameters, `each` with so many bytes of states and copies, where
    the buffers of all subgroups in flight may take `memory` bytes.
    """
    low, high = _SUBGROUP_RANGE
    size = min(high, max(low, parameters // _SUBGROUPS_PER_OPTIMIZER))
    size = 1 << (size.bit_length() - 1)
    while size > _SMALLEST_SUBGROUP and SUBGROUPS_IN_FLIGHT * each * size > memory:
        size //= 2
    return size


def optimizer_need(states_bytes: int, weights_bytes: int, overlap: Overlap) -> int:
    """Return the bytes that an optimizer's tickets take on their tiers at most.

    With `commit`, old states stay until the new ones become current at `step()`, and new weights
    wait next to them: twice the states, and once the weights. Gradients may come on top.
    """
    ahead = states_bytes + weights_bytes if overlap == "commit" else 0
    return states_bytes + ahead


@dataclass(frozen=True, slots=True)
class HostMemoryPrediction:
    """Bytes at the peak by their use; `str` gives a table. See [Note: memory at the peak]."""

    process: int  # Memory of the process now, and what the first step adds
    computing: int  # Activations in use, and gradients
    weights: int  # Buffers of the blocks in flight
    states: int  # Buffers of optimizer states that are updated now and next
    waiting: int  # Buffers of new weights that wait for `step()`
    ready: int  # Idle buffers, and buffers of prefetched activations
    beyond: int  # The part of these buffers that ``memory.pinned`` does not allow

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts."""
        buffers = self.weights + self.states + self.waiting + self.ready - self.beyond
        return self.process + self.computing + buffers

    def __str__(self) -> str:
        """A table in Markdown."""
        rows = {
            "process before the first step": self.process,
            "activations in use, gradients": self.computing,
            "weights of blocks in flight": self.weights,
            "optimizer states": self.states,
            "new weights until `step()`": self.waiting,
            "idle and prefetched buffers": self.ready,
            "buffers beyond memory.pinned": -self.beyond,
            "peak": self.peak_bytes,
        }
        sizes = ((name, format_size(nbytes)) for name, nbytes in rows.items())
        return markdown_table("| host memory", sizes)


def predict_host_memory(
    *,
    process_bytes: int,
    computing_bytes: int,
    blocks: Sequence[int],
    blocks_in_flight: int,
    trained: int,
    largest: int,
    subgroup: int,
    states_share: float,
    upcast_share: float = 0.0,
    overlap: Overlap,
    pinned: int,
    idle: int,
) -> HostMemoryPrediction:
    """Add up the memory at the peak of training with streamed weights, in bytes.

    The process is counted without buffers and weights that will be offloaded; computing needs
    activations and gradients. `blocks` has the weights of each block, in the order in which they
    compute. Weights that are `trained` have so many bytes in all, in the `largest` one, and in a
    `subgroup` that is updated at a time; each of their bytes has a share of states on the tiers and
    of upcast copies of states. At most `idle` bytes of buffers are kept for the next request.
    """
    runs = (sum(blocks[place : place + blocks_in_flight]) for place in range(len(blocks)))
    weights = max(runs, default=0)
    # In backward all subgroups of a parameter get their gradients at once; at step() one by one.
    updated = 2 * subgroup if overlap == "off" else largest
    states = int(states_share * (updated + subgroup))
    waiting = min(trained, pinned // 2) if overlap == "commit" else 0
    ready = idle + _AHEAD_BYTES
    return HostMemoryPrediction(
        process=process_bytes + _FIRST_STEP_BYTES,
        computing=computing_bytes + int(upcast_share * subgroup),
        weights=weights,
        states=states,
        waiting=waiting,
        ready=ready,
        beyond=max(0, weights + states + waiting + ready - pinned),
    )
