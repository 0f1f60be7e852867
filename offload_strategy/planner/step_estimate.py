"""The step of a transformer on a GPU, and how many of its activations to offload (Fuyou).

`planner.step_time` has the equations. This module derives their inputs from the shape of the model
and the figures of the machine, and searches over the bytes D of activations that are offloaded
instead of recomputed (section 4.5).

[Note: the order of offloading]
The input of each layer is always offloaded (D_start). What is computed inside a layer is either
recomputed in backward or offloaded: first what costs most FLOP for a byte, "down" before the others
in a GPT (table 2). The result of attention is one more candidate here, because its FLOP grow with
the sequence. Every prefix of this order is tried. A decoder's cross-attention is always recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offload_strategy.planner.saved_tensor_bytes import Workload, checkpoint_bytes
from offload_strategy.planner.step_time import (
    Rates,
    StepProfile,
    StepTime,
    limit_name,
    predict_step,
)
from offload_strategy.planner.transformer_shape import TransformerShape, positive

#: Bytes per parameter: float32 weights and both moments of Adam.
STATE_BYTES = 12
#: Bytes per parameter of weights, and of gradients, in half precision.
WEIGHT_BYTES = 2
#: Steps whose times differ by less than this share count as equally fast: less is offloaded then.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine does in a second.

    Args:
        flops: FLOP/s that the device reaches in a transformer block.
        update_rate: Parameters that the optimizer updates on the host.
        rates: Rates of paths and link.

    Raises:
        ConfigError: If a figure is not above 0.
    """

    flops: float
    update_rate: float
    rates: Rates

    def __post_init__(self) -> None:
        for name in ("flops", "update_rate"):
            positive(f"machine: {name}", getattr(self, name))
        for name in ("read", "write", "link", "paths"):
            positive(f"machine: rates.{name}", getattr(self.rates, name))


@dataclass(frozen=True, slots=True)
class Swap:
    """Which results inside the layers are offloaded, and the step that this gives.

    Args:
        counts: In how many layers each part's result is offloaded, by name.
        inner_bytes: Bytes of these results.
        checkpoint_bytes: Bytes of the inputs of the layers, which are always offloaded.
        all_bytes: What `inner_bytes` would be if all results were offloaded.
        flops: FLOP that the device computes in the step, recomputation included.
        profile: What the step computes and moves.
        time: Time of the step.
    """

    counts: dict[str, int]
    inner_bytes: int
    checkpoint_bytes: int
    all_bytes: int
    flops: float
    profile: StepProfile
    time: StepTime

    @property
    def coefficient(self) -> float:
        """Share of the results inside the layers that is offloaded (Fuyou, section 5.6)."""
        return self.inner_bytes / self.all_bytes

    @property
    def moved_bytes(self) -> int:
        """D: bytes that are written in forward and read in backward."""
        return self.inner_bytes + self.checkpoint_bytes

    @property
    def written_bytes(self) -> float:
        """Bytes that the paths write in a step: activations, states and updated weights."""
        return self.time.written_bytes

    def limit(self, stage: Literal["forward", "backward"]) -> str:
        """Name of the resource that limits a stage, such as "backward paths" or "update"."""
        return limit_name(stage, self.time.stage(stage).limit)


def swaps(
    shape: TransformerShape, work: Workload, machine: Machine, *, streams_weights: bool = True
) -> Iterator[Swap]:
    """Try every amount of activations, the least first; see [Note: the order of offloading].

    Args:
        shape: Shape of the model.
        work: Batch and sequence.
        machine: The machine.
        streams_weights: Whether weights are read from the paths in both passes, or stay on the
            device.
    """
    ordered = sorted(
        shape.parts(work.batch, work.sequence, work.dtype_bytes),
        key=lambda part: part.flops_per_byte,
        reverse=True,
    )
    recomputed = shape.layers * shape.layer_flops(work.batch, work.sequence)
    inputs = checkpoint_bytes(shape, work)
    everything = shape.layers * sum(part.output_bytes for part in ordered)
    forward = shape.forward_flops(work.batch, work.sequence) / machine.flops
    parameters = shape.parameters
    weights = WEIGHT_BYTES * parameters
    counts: dict[str, int] = {}
    moved = 0

    def swap() -> Swap:
        profile = StepProfile(
            forward_seconds=forward,
            update_seconds=parameters / machine.update_rate,
            recompute_seconds=max(0.0, recomputed) / machine.flops,
            weights_bytes=weights if streams_weights else 0.0,
            gradients_bytes=weights,
            states_read_bytes=STATE_BYTES * parameters,
            states_written_bytes=STATE_BYTES * parameters,
            activations_bytes=inputs + moved,
        )
        computed = (forward + profile.backward_computation) * machine.flops
        time = predict_step(profile, machine.rates)
        return Swap(dict(counts), moved, inputs, everything, computed, profile, time)

    yield swap()
    for part in ordered:
        for _ in range(shape.layers):
            counts[part.name] = counts.get(part.name, 0) + 1
            moved += part.output_bytes
            recomputed -= part.flops
            yield swap()


def best_swap(
    shape: TransformerShape,
    work: Workload,
    machine: Machine,
    *,
    streams_weights: bool = True,
    room_bytes: float = math.inf,
) -> Swap:
    """Return the fastest of `swaps`; of equally fast ones the smallest (equations 1 to 12).

    Args:
        shape: Shape of the model.
        work: Batch and sequence.
        machine: The machine.
        streams_weights: Whether weights are read from the paths in both passes.
        room_bytes: Room on the drives for activations. Inputs of layers are offloaded even if
            there is none.
    """
    candidates = swaps(shape, work, machine, streams_weights=streams_weights)
    best = next(candidates)
    for candidate in candidates:
        if candidate.moved_bytes > room_bytes:
            break
        if candidate.time.seconds < best.time.seconds * (1 - _SAME):
            best = candidate
    return best
