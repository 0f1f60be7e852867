"""How much host memory streamed training will take, before it begins.

[Note: what is in memory at the worst moment]
That moment is in backward, while a block in the middle of the model computes. Outside of buffers
there are activations in use, gradients that no update has used yet, and what the process had
before. In buffers, there is what the shape census says: the weights of the blocks in flight; the
states of the parameter that is updated and of the next subgroup; with `commit`, new weights that
wait for `step()`; activations that come back ahead of their use; and buffers that are kept for the
next request. All buffers together are bounded by ``memory.pinned``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offload_strategy.units import MiB, format_size

#: Libraries that are loaded, threads and their stacks, workspaces of kernels: from the first step.
_FIRST_STEP_BYTES = 38 * MiB
#: Activations that come back ahead of their use.
_AHEAD_BYTES = 32 * MiB


@dataclass(frozen=True, slots=True)
class StreamedShapes:
    """What the forecast must know of a model and its optimizer, in bytes.

    Args:
        blocks: weights of each block, in the order in which they compute.
        trained: weights that are updated, all together.
        largest: the largest of them.
        subgroup: weights that are updated at a time, at most.
        states_share: bytes of states on the tiers for each byte of a weight.
        widened_share: bytes of copies in which states are computed, for each byte of a weight.
    """

    blocks: Sequence[int]
    trained: int
    largest: int
    subgroup: int
    states_share: float
    widened_share: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes at the worst moment, by what they are for; `str` makes a table.

    Args:
        process: what the process has already, and what the first step loads.
        computing: activations in use, and gradients.
        weights: buffers of the blocks in flight.
        states: buffers of optimizer states that are updated now and next.
        waiting: buffers of new weights that wait for `step()`.
        ready: buffers that are kept, or were read into ahead of their use.
        beyond: of these buffers, what ``memory.pinned`` does not allow.
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
        """All together."""
        buffers = self.weights + self.states + self.waiting + self.ready - self.beyond
        return self.process + self.computing + buffers

    def __str__(self) -> str:
        """A table in Markdown."""
        rows = {
            "the process, before": self.process,
            "activations in use, gradients": self.computing,
            "weights in flight": self.weights,
            "optimizer states": self.states,
            "new weights that wait": self.waiting,
            "buffers that are ready": self.ready,
            "of the buffers not allowed by memory.pinned": -self.beyond,
            "peak": self.peak_bytes,
        }
        lines = ["| | host memory |", "|---|---|"]
        for name, nbytes in rows.items():
            sign = "-" if nbytes < 0 else ""
            lines.append(f"| {name} | {sign}{format_size(abs(nbytes))} |")
        return "\n".join(lines)


def memory_forecast(
    shapes: StreamedShapes,
    *,
    process_bytes: int,
    computing_bytes: int,
    blocks_in_flight: int,
    overlap: Literal["commit", "eager", "off"],
    pinned: int,
    idle: int,
) -> MemoryForecast:
    """Add up what is in memory at the worst moment.

    Args:
        shapes: of the model.
        process_bytes: resident now, without buffers and weights that will leave.
        computing_bytes: activations and gradients at most.
        blocks_in_flight: as configured.
        overlap: likewise.
        pinned: likewise, in bytes.
        idle: bytes of buffers that are kept for the next request at most.
    """
    weights = _most_together(shapes.blocks, blocks_in_flight)
    # In backward all pieces of a parameter are complete at once; at step() one after the other is.
    updated = 2 * shapes.subgroup if overlap == "off" else shapes.largest
    states = int(shapes.states_share * (updated + shapes.subgroup))
    waiting = min(shapes.trained, pinned // 2) if overlap == "commit" else 0
    ready = idle + _AHEAD_BYTES
    return MemoryForecast(
        process=process_bytes + _FIRST_STEP_BYTES,
        computing=computing_bytes + int(shapes.widened_share * shapes.subgroup),
        weights=weights,
        states=states,
        waiting=waiting,
        ready=ready,
        beyond=max(0, weights + states + waiting + ready - pinned),
    )


def _most_together(blocks: Sequence[int], count: int) -> int:
    """Bytes of the largest run of neighbouring blocks."""
    runs = [sum(blocks[place : place + count]) for place in range(len(blocks))]
    return max(runs, default=0)
