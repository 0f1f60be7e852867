"""One choice of settings for a run, and where its tensors lie.

[Note: who gets host memory]
What leaves the device goes to host memory as long as there is some, and to the drives beyond. Up to
four kinds of bytes compete for it, and which is best served first depends on what limits the step,
so the order is part of the choice:

    weights       of a model whose weights pass through the device
    activations   of one micro-batch
    waiting       gradients, and new weights until `step()`, with overlap: commit; both in buffers
                  of `memory.pinned`, of which new weights may take half
    states        of the optimizer, with overlap: commit twice
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from offload_strategy.errors import ConfigError
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.step_estimate import STATE_BYTES
from offload_strategy.planner.transformer_shape import positive

Overlap = Literal["commit", "eager", "off"]
StateType = Literal["float32", "bfloat16"]
Held = Literal["weights", "activations", "waiting", "states"]

#: Both moments in bfloat16 beside a float32 copy of the weights, which is kept whole.
NARROW_STATE_BYTES = 8


def state_bytes(dtype: StateType) -> int:
    """Bytes of states for a parameter: both moments, and weights in float32."""
    return STATE_BYTES if dtype == "float32" else NARROW_STATE_BYTES


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings of a run.

    Args:
        batch: sequences of a step, in all micro-batches together.
        micro_batches: passes whose gradients add up to a step; they divide the batch.
        sequence: tokens of each sequence.
        recomputed_layers: layers of which only the input is kept; the rest is computed again.
        moves_optimizer: whether states leave the device, and gradients with them.
        moves_parameters: whether weights pass through the device; states leave as well then.
        overlap: when the update runs; of no account where states stay.
        state_dtype: in which states are kept.
        blocks_in_flight: layers of weights on the device where they pass through.
        host_first: who gets host memory first; see [Note: who gets host memory].

    Raises:
        ConfigError: if numbers are not above 0, micro-batches do not divide the batch, or weights
            would leave and states stay.
    """

    batch: int
    micro_batches: int
    sequence: int
    recomputed_layers: int = 0
    moves_optimizer: bool = False
    moves_parameters: bool = False
    overlap: Overlap = "commit"
    state_dtype: StateType = "float32"
    blocks_in_flight: int = 2
    host_first: tuple[Held, ...] = ("weights", "activations", "waiting", "states")

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches", "sequence", "blocks_in_flight"):
            positive(f"choice: {name}", getattr(self, name))
        if self.batch % self.micro_batches:
            raise ConfigError(
                f"choice: {self.micro_batches} micro-batches do not divide a batch of "
                f"{self.batch}; give a divisor"
            )
        if self.moves_parameters and not self.moves_optimizer:
            raise ConfigError(
                "choice: weights leave the device and states, six times as many bytes, stay: set "
                "moves_optimizer as well"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    @property
    def state_bytes(self) -> int:
        """Bytes of states for a parameter."""
        return state_bytes(self.state_dtype)


@dataclass(frozen=True, slots=True)
class Split:
    """Bytes of one kind that have left the device.

    Args:
        host_bytes: in host memory.
        ssd_bytes: on the drives.
    """

    host_bytes: int
    ssd_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.host_bytes + self.ssd_bytes

    @property
    def ssd_share(self) -> float:
        """Share on the drives, from 0 to 1."""
        return self.ssd_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A choice, and where its tensors lie.

    Args:
        choice: of the settings.
        held: what has left the device, by kind; kinds of which nothing has are left out.
        fits: memory of each kind and disk, needed and there.
        saved_bytes: what the layers save in the forward pass of a micro-batch.
        subgroup_size: parameters updated at a time; None where states stay.
        pinned_bytes: of buffers, `memory.pinned`: for staging, and for what waits.
        gradient_bytes: of gradients that wait there, `optimizer.gradient_memory`.
    """

    choice: Choice
    held: Mapping[Held, Split]
    fits: tuple[Fit, ...]
    saved_bytes: int
    subgroup_size: int | None
    pinned_bytes: int
    gradient_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is enough of everything."""
        return all(fit.ok for fit in self.fits)

    def split(self, kind: Held) -> Split:
        """Where the bytes of a kind are; nothing, where none has left."""
        return self.held.get(kind, _NOWHERE)


_NOWHERE = Split(0, 0)
