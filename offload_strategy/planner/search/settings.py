"""The settings of a run that the search tries, and the placement of its tensors.

[Note: priority for host memory]
What leaves the device goes to host memory as long as there is room, and to the drives beyond. Up to
four kinds of bytes compete for host memory. Which of them is best served first depends on what
limits the step, so the order is one of the settings:

    weights       of a model with streamed weights
    activations   of one micro-batch
    waiting       gradients, and new weights until `step()`, with overlap: commit; both in buffers
                  of `memory.pinned`, of which new weights may take half
    states        of the optimizer, with overlap: commit twice
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from offload_strategy.errors import ConfigError
from offload_strategy.planner.host_memory_needs import weight_buffers
from offload_strategy.planner.memory_needs import Fit
from offload_strategy.planner.saved_tensor_bytes import (
    Workload,
    activation_bytes,
    checkpoint_bytes,
    layer_activation_bytes,
)
from offload_strategy.planner.step_estimate import STATE_BYTES
from offload_strategy.planner.transformer_shape import TransformerShape, positive
from offload_strategy.units import MiB

Overlap = Literal["commit", "eager", "off"]
StateType = Literal["float32", "bfloat16"]
OffloadedKind = Literal["weights", "activations", "waiting", "states"]

#: Bytes per parameter: both moments in bfloat16 next to a float32 copy of the weights.
BFLOAT16_STATE_BYTES = 8
#: Smaller storages are not offloaded (`activations.min_size`).
MIN_STORAGE_BYTES = 1 * MiB
#: Subgroups in flight may take one part in so many of the memory that training may take.
SUBGROUPS_SHARE = 8


def state_bytes(dtype: StateType) -> int:
    """Return the bytes of states per parameter: both moments, and weights in float32."""
    return STATE_BYTES if dtype == "float32" else BFLOAT16_STATE_BYTES


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run.

    Args:
        batch: Sequences of a step, in all micro-batches together.
        micro_batches: Micro-batches of a step; their number divides the batch.
        sequence: Tokens of each sequence.
        recomputed_layers: Layers that are recomputed in backward from their inputs.
        offloads_optimizer: Whether optimizer states and gradients leave the device.
        streams_weights: Whether weights are streamed through the device; states are offloaded
            then as well.
        overlap: When the update runs; without effect if states stay.
        state_dtype: Type in which states are stored.
        blocks_in_flight: Layers of streamed weights that are on the device at a time.
        host_priority: Order in which tensors get host memory; see
            [Note: priority for host memory].

    Raises:
        ConfigError: If a number is not above 0, the micro-batches do not divide the batch, or
            weights would be streamed while states stay.
    """

    batch: int
    micro_batches: int
    sequence: int
    recomputed_layers: int = 0
    offloads_optimizer: bool = False
    streams_weights: bool = False
    overlap: Overlap = "commit"
    state_dtype: StateType = "float32"
    blocks_in_flight: int = 2
    host_priority: tuple[OffloadedKind, ...] = ("weights", "activations", "waiting", "states")

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batches", "sequence", "blocks_in_flight"):
            positive(f"settings: {name}", getattr(self, name))
        if self.batch % self.micro_batches:
            raise ConfigError(
                f"settings: {self.micro_batches} micro-batches do not divide a batch of "
                f"{self.batch}; give a divisor"
            )
        if self.streams_weights and not self.offloads_optimizer:
            raise ConfigError(
                "settings: weights are streamed, but states, which are six times as large, stay "
                "on the device: set offloads_optimizer as well"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    @property
    def state_bytes(self) -> int:
        """Bytes of states per parameter."""
        return state_bytes(self.state_dtype)

    def micro_batch(self, work: Workload) -> Workload:
        """Return a workload with the batch and the sequence of one micro-batch."""
        return replace(work, batch=self.batch // self.micro_batches, sequence=self.sequence)

    def check_layers(self, shape: TransformerShape) -> None:
        """Check that a model has the layers that are to be recomputed.

        Raises:
            ConfigError: If it does not.
        """
        if not 0 <= self.recomputed_layers <= shape.layers:
            raise ConfigError(
                f"settings: {self.recomputed_layers} layers are to be recomputed, but the model "
                f"has {shape.layers}: give 0 to {shape.layers}"
            )


@dataclass(frozen=True, slots=True)
class TierSplit:
    """Bytes of one kind that have left the device.

    Args:
        host_bytes: Bytes in host memory.
        ssd_bytes: Bytes on the drives.
    """

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


@dataclass(frozen=True, slots=True)
class Placement:
    """Settings, and where the tensors of a run are with them.

    Args:
        settings: The settings.
        offloaded: What has left the device, by kind, without kinds of which nothing has.
        fits: Needed and available bytes of each kind of memory and of the drives.
        saved_bytes: Bytes that the layers save in the forward pass of a micro-batch.
        subgroup_size: Parameters that are updated at a time; None if states stay.
        pinned_bytes: Bytes of buffers (`memory.pinned`), for staging and for what waits.
        gradient_bytes: Bytes of gradients that wait in them (`optimizer.gradient_memory`).
    """

    settings: Settings
    offloaded: Mapping[OffloadedKind, TierSplit]
    fits: tuple[Fit, ...]
    saved_bytes: int
    subgroup_size: int | None
    pinned_bytes: int
    gradient_bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is enough of everything."""
        return all(fit.ok for fit in self.fits)

    def split(self, kind: OffloadedKind) -> TierSplit:
        """Return where the bytes of a kind are; no bytes if none has left."""
        return self.offloaded.get(kind, _NOTHING)


_NOTHING = TierSplit(0, 0)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that follow from the model and the work of a micro-batch alone, in bytes.

    Args:
        parameters: Number of parameters of the model.
        layer_parameters: Number of parameters of the largest layer.
        ends: Number of parameters of embedding and head.
        saved: What all layers save for backward.
        movable: What of it is large enough to be offloaded.
        saved_layer: What the largest layer saves.
        layer_input: The input of a layer.
        logits: The logits of one sequence.
    """

    parameters: int
    layer_parameters: int
    ends: int
    saved: int
    movable: int
    saved_layer: int
    layer_input: int
    logits: int


@functools.lru_cache(maxsize=4096)
def model_sizes(shape: TransformerShape, work: Workload) -> ModelSizes:
    """Count what does not depend on the settings.

    Args:
        shape: Shape of the model.
        work: Work of a micro-batch.
    """
    return ModelSizes(
        parameters=shape.parameters,
        layer_parameters=shape.layer_parameters,
        ends=(1 if shape.tied else 2) * shape.vocabulary * shape.hidden,
        saved=activation_bytes(shape, work, 0),
        movable=activation_bytes(shape, work, MIN_STORAGE_BYTES // work.dtype_bytes),
        saved_layer=layer_activation_bytes(shape, work),
        layer_input=checkpoint_bytes(shape, work) // shape.layers,
        logits=work.sequence * shape.vocabulary * work.dtype_bytes,
    )


@functools.lru_cache(maxsize=64)
def weights_in_flight_bytes(shape: TransformerShape, blocks: int) -> int:
    """Return the bytes of buffers for streamed weights in half precision.

    Args:
        shape: Shape of the model.
        blocks: Layers whose weights are on their way at a time.
    """
    return weight_buffers(shape, blocks).exact_bytes
