"""The settings of a run that the search tries, and where its tensors are with them.

Which tensors get host memory first is one of them; docs/planning.md tells why.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offload_strategy.config.value_types import Overlap, StateType
from offload_strategy.planner.request import WEIGHT_BYTES
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import MiB

OffloadedKind = Literal["weights", "activations", "waiting", "states"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run."""

    batch: int  # Sequences of a step, in all micro-batches together
    micro_batches: int  # Micro-batches of a step; their number divides the batch
    sequence: int  # Tokens of each sequence
    recomputed_layers: int = 0  # Layers that are recomputed in backward from their inputs
    offloads_optimizer: bool = False  # Whether optimizer states and gradients leave the device
    # Whether weights are streamed through the device; states are offloaded then as well
    streams_weights: bool = False
    overlap: Overlap = "commit"  # When the update runs; without effect if states stay
    state_dtype: StateType = "float32"  # Type in which states are stored
    blocks_in_flight: int = 2  # Layers of streamed weights that are on the device at a time
    # Order in which tensors get host memory
    host_priority: tuple[OffloadedKind, ...] = ("weights", "activations", "waiting", "states")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // self.micro_batches


class TierSplit(NamedTuple):
    """Bytes of one kind that have left the device, in host memory and on the drives."""

    host_bytes: int
    ssd_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes in both."""
        return self.host_bytes + self.ssd_bytes

    @property
    def ssd_share(self) -> float:
        """Share on the drives, from 0 to 1."""
        return self.ssd_bytes / self.total_bytes if self.total_bytes else 0.0


class Fit(NamedTuple):
    """Needed and available bytes of a limited resource."""

    what: str
    needed_bytes: int
    available_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is enough."""
        return self.needed_bytes <= self.available_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Settings, and where the tensors of a run are with them."""

    settings: Settings  # The settings
    # What has left the device, by kind, without kinds of which nothing has
    offloaded: Mapping[OffloadedKind, TierSplit]
    fits: tuple[Fit, ...]  # Needed and available bytes of each kind of memory and of the drives
    subgroup_size: int | None  # Parameters that are updated at a time; None if states stay
    pinned_bytes: int  # Bytes of buffers (`memory.pinned`), for staging and for what waits
    # Bytes of `optimizer.gradient_memory`: of gradients, and on a GPU of new weights as well
    gradient_memory: int

    @property
    def ok(self) -> bool:
        """Whether there is enough of everything."""
        return all(fit.ok for fit in self.fits)

    @property
    def shortage(self) -> float:
        """How many times as much as there is the scarcest resource would have to be."""
        return max(fit.needed_bytes / max(1, fit.available_bytes) for fit in self.fits)

    @property
    def uses_drives(self) -> bool:
        """Whether anything is on the drives."""
        return any(split.ssd_bytes for split in self.offloaded.values())

    def split(self, kind: OffloadedKind) -> TierSplit:
        """Return where the bytes of a kind are; no bytes if none has left."""
        return self.offloaded.get(kind, TierSplit(0, 0))


def weight_buffers(shape: TransformerShape, blocks_in_flight: int = 1) -> dict[int, int]:
    """Return the buffers through which streamed weights pass in half precision: counts by bytes.

    There is one for every matrix of as many layers as are on their way at a time, and for embedding
    and head (MemAscend, section IV-B). Layers that differ take those of the largest. Norms, biases
    and small matrices stay in memory and need none.
    """
    counts: Counter[int] = Counter()
    for elements in shape.layer_matrices(crosses=shape.decoder_layers > 0):
        counts[WEIGHT_BYTES * elements] += min(blocks_in_flight, shape.layers)
    counts[WEIGHT_BYTES * shape.vocabulary * shape.hidden] += 1 if shape.tied else 2
    return {size: counts[size] for size in sorted(counts, reverse=True) if size >= MiB}


@functools.lru_cache(maxsize=64)
def weights_in_flight_bytes(shape: TransformerShape, blocks: int) -> int:
    """Return the bytes of buffers for the streamed weights of so many layers, in half precision."""
    return sum(size * count for size, count in weight_buffers(shape, blocks).items())
