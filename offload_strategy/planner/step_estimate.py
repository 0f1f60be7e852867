"""How long a step takes on a machine, and how much of the activations is worth moving (Fuyou).

Fuyou's equations are `offload_strategy.planner.step_time`. Here are the numbers that go into
them, from the shape of the model and the figures of the machine, and the search over the bytes D of
activations that move instead of being computed again (section 4.5).

[Note: the order of swapping]
The input of each layer always moves (D_start). What is computed inside a layer is either computed
again in backward or moves: first what costs most FLOP for a byte, "down" before the others in a GPT
(table 2). The result of attention is one more candidate here, as its FLOP count with the sequence.
Every prefix of this order is tried. A decoder's second attention is always computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offload_strategy.planner.saved_tensor_bytes import Workload, checkpoint_bytes
from offload_strategy.planner.step_time import Rates, StepProfile, StepTime, predict_step
from offload_strategy.planner.transformer_shape import Part, TransformerShape, positive

#: float32 weights and both moments of Adam.
STATE_BYTES = 12
#: Weights and gradients in half precision.
WEIGHT_BYTES = 2
#: Swaps of less than this share of a step apart count as equally fast: the smaller one is taken.
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine does in a second.

    Args:
        flops: of the device, as a transformer block gets them.
        update_rate: parameters that the optimizer updates on the host.
        rates: of paths and link.

    Raises:
        ConfigError: if a number is not above 0.
    """

    flops: float
    update_rate: float
    rates: Rates

    def __post_init__(self) -> None:
        positive("machine: flops", self.flops)
        positive("machine: update_rate", self.update_rate)
        positive("machine: rates.read", self.rates.read)
        positive("machine: rates.write", self.rates.write)
        positive("machine: rates.link", self.rates.link)
        positive("machine: rates.paths", self.rates.paths)


@dataclass(frozen=True, slots=True)
class Swap:
    """How much of what is computed inside the layers moves, and the step that gives.

    Args:
        counts: in how many layers each part's result moves, by name.
        inner_bytes: bytes of these results.
        checkpoint_bytes: inputs of the layers, which move in any case.
        all_bytes: what `inner_bytes` would be if all results moved.
        flops: that the device computes in the step, what it computes again included.
        profile: of the step.
        time: of the step.
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
        """Share of the results inside the layers that moves (Fuyou, section 5.6)."""
        return self.inner_bytes / self.all_bytes

    @property
    def moved_bytes(self) -> int:
        """D: bytes that leave in forward and come back in backward."""
        return self.inner_bytes + self.checkpoint_bytes

    @property
    def written_bytes(self) -> float:
        """Bytes that the paths write in a step: activations, states and updated weights."""
        profile = self.profile
        return self.moved_bytes + profile.states_written_bytes + profile.weights_bytes

    def limit(self, stage: Literal["forward", "backward"]) -> str:
        """Name of what takes the stage its time."""
        names = [
            name
            for name in self.time.limits
            if (name.startswith("forward")) == (stage == "forward")
        ]
        return max(names, key=lambda name: self.time.limits[name])


def swaps(
    shape: TransformerShape, work: Workload, machine: Machine, *, streams_weights: bool = True
) -> Iterator[Swap]:
    """Try every amount of activations to move, the least first; see [Note: the order of swapping].

    Args:
        shape: of the model.
        work: batch and sequence.
        machine: that it runs on.
        streams_weights: whether weights come from the paths in both passes, or stay on the device.
    """
    ordered = sorted(
        shape.parts(work.batch, work.sequence, work.dtype_bytes),
        key=lambda part: part.flops_per_byte,
        reverse=True,
    )
    again = shape.layers * shape.layer_flops(work.batch, work.sequence)
    inputs = checkpoint_bytes(shape, work)
    everything = shape.layers * sum(part.output_bytes for part in ordered)
    forward = shape.forward_flops(work.batch, work.sequence) / machine.flops
    parameters = shape.parameters
    update = parameters / machine.update_rate
    weights = WEIGHT_BYTES * parameters
    counts: dict[str, int] = {}
    moved = 0

    def swap() -> Swap:
        profile = StepProfile(
            forward_seconds=forward,
            update_seconds=update,
            recompute_seconds=max(0.0, again) / machine.flops,
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
    for part in _per_layer(ordered, shape.layers):
        counts[part.name] = counts.get(part.name, 0) + 1
        moved += part.output_bytes
        again -= part.flops
        yield swap()


def best_swap(
    shape: TransformerShape,
    work: Workload,
    machine: Machine,
    *,
    streams_weights: bool = True,
    room_bytes: float = math.inf,
) -> Swap:
    """The fastest of `swaps`, and the least of those that are as fast (equations 1 to 12).

    Args:
        shape: of the model.
        work: batch and sequence.
        machine: that it runs on.
        streams_weights: whether weights come from the paths in both passes.
        room_bytes: for what moves. Inputs of layers move even if there is none.
    """
    candidates = swaps(shape, work, machine, streams_weights=streams_weights)
    best = next(candidates)
    for candidate in candidates:
        if candidate.moved_bytes > room_bytes:
            break
        if candidate.time.step < best.time.step * (1 - _SAME):
            best = candidate
    return best


def _per_layer(parts: list[Part], layers: int) -> Iterator[Part]:
    for part in parts:
        for _ in range(layers):
            yield part
