"""Prediction of the host memory of streamed training, before it starts.

[Note: memory at the peak]
The peak is in backward, while a block in the middle of the model computes. Outside of buffers there
are activations in use, gradients that no update has used yet, and what the process had before. In
buffers there are the weights of the blocks in flight; the states of the parameter that is being
updated and of the next subgroup; with `commit`, new weights that wait for `step()`; prefetched
activations; and idle buffers that are kept for the next request. ``memory.pinned`` bounds the sum
of all buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_strategy.units import MiB, format_size

#: Libraries, thread stacks and kernel workspaces that the first step adds.
_FIRST_STEP_BYTES = 38 * MiB
#: Prefetched activations.
_AHEAD_BYTES = 32 * MiB


@dataclass(frozen=True, slots=True)
class StreamedModelSizes:
    """Sizes of a model with streamed weights and of its optimizer, in bytes.

    Args:
        blocks: Weights of each block, in the order in which they compute.
        trained: All weights that are updated.
        largest: The largest of them.
        subgroup: The most weights that are updated at a time.
        states_share: Bytes of states on the tiers for each byte of a weight.
        upcast_share: Bytes of upcast copies of states for each byte of a weight.
    """

    blocks: Sequence[int]
    trained: int
    largest: int
    subgroup: int
    states_share: float
    upcast_share: float = 0.0


@dataclass(frozen=True, slots=True)
class HostMemoryPrediction:
    """Bytes at the peak by their use; `str` gives a table.

    Args:
        process: Memory of the process now, and what the first step adds.
        computing: Activations in use, and gradients.
        weights: Buffers of the blocks in flight.
        states: Buffers of optimizer states that are updated now and next.
        waiting: Buffers of new weights that wait for `step()`.
        ready: Idle buffers, and buffers of prefetched activations.
        beyond: The part of these buffers that ``memory.pinned`` does not allow.
    """

    process: int
    computing: int
    weights: int
    states: int
    waiting: int
    ready: int
    beyond: int

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
        lines = ["| | host memory |", "|---|---|"]
        for name, nbytes in rows.items():
            sign = "-" if nbytes < 0 else ""
            lines.append(f"| {name} | {sign}{format_size(abs(nbytes))} |")
        return "\n".join(lines)


def predict_host_memory(
    sizes: StreamedModelSizes,
    *,
    process_bytes: int,
    computing_bytes: int,
    blocks_in_flight: int,
    overlap: Literal["commit", "eager", "off"],
    pinned: int,
    idle: int,
) -> HostMemoryPrediction:
    """Add up the memory at the peak.

    Args:
        sizes: Sizes of the model and its optimizer.
        process_bytes: Resident memory now, without buffers and weights that will be offloaded.
        computing_bytes: Largest number of bytes of activations and gradients.
        blocks_in_flight: ``parameters.blocks_in_flight``.
        overlap: ``optimizer.overlap``.
        pinned: ``memory.pinned`` in bytes.
        idle: Largest number of bytes of idle buffers that are kept for the next request.
    """
    weights = _most_together(sizes.blocks, blocks_in_flight)
    # In backward all subgroups of a parameter get their gradients at once; at step() one by one.
    updated = 2 * sizes.subgroup if overlap == "off" else sizes.largest
    states = int(sizes.states_share * (updated + sizes.subgroup))
    waiting = min(sizes.trained, pinned // 2) if overlap == "commit" else 0
    ready = idle + _AHEAD_BYTES
    return HostMemoryPrediction(
        process=process_bytes + _FIRST_STEP_BYTES,
        computing=computing_bytes + int(sizes.upcast_share * sizes.subgroup),
        weights=weights,
        states=states,
        waiting=waiting,
        ready=ready,
        beyond=max(0, weights + states + waiting + ready - pinned),
    )


def _most_together(blocks: Sequence[int], count: int) -> int:
    """Return the bytes of the largest run of neighbouring blocks."""
    runs = [sum(blocks[place : place + count]) for place in range(len(blocks))]
    return max(runs, default=0)
