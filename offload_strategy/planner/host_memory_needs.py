"""Peak host memory of training with states on SSDs, and the staging buffers in it (MemAscend).

[Note: parts of the peak]
MemAscend's section V-A lists the parts for Qwen2.5-7B. They, and the totals of all four models of
its figure 13, follow from these buffers:

    gradients         one flat buffer, 4 bytes a parameter (section III-C)
    overflow check    1.25 times as much while isinf and isnan run over it (section III-C)
    weights           as many buffers as the blocks in flight have weights: of the largest one's
                      size in ZeRO-Infinity, of their own size in MemAscend (section IV-B)
    states, swap-out  5 float32 buffers and 1 half-precision buffer of the largest weight's size.
                      The paper says 11.17 GiB for both without their number: 5 and 1 give 11.166
    rounding          PyTorch rounds each pinned buffer up to the next power of two (section III-B);
                      it is a row of its own

The process itself (interpreter, libraries, device contexts) is not counted. The paper's measured
totals exceed the sums by that: 1.6 to 1.8 GiB for every model and both systems.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from offload_strategy.planner.transformer_shape import TransformerShape, positive

System = Literal["zero-infinity", "memascend", "streamed"]

_GRADIENT_BYTES = 4
_STATE_BYTES = 4
_WEIGHT_BYTES = 2
#: Of the flat buffer, while the overflow check runs: a copy, and up to a byte for each value.
_CHECK_SHARE = 1.25
#: See [Note: parts of the peak].
_STATE_BUFFERS = 5
_SWAP_BUFFERS = 1
#: Smaller weights stay in memory.
_SMALLEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightBuffers:
    """How many staging buffers of which size, in bytes, a model's weights need, largest first."""

    counts: dict[int, int]

    @property
    def exact_bytes(self) -> int:
        """Bytes with one pool of buffers for each size: MemAscend's adaptive pool."""
        return sum(nbytes * buffers for nbytes, buffers in self.counts.items())

    @property
    def one_size_bytes(self) -> int:
        """Bytes of as many buffers that all have the largest weight's size, as ZeRO-Infinity."""
        return max(self.counts, default=0) * sum(self.counts.values())


def weight_buffers(shape: TransformerShape, blocks_in_flight: int = 1) -> WeightBuffers:
    """Return the buffers through which weights pass in half precision (MemAscend, section IV-B).

    There is one for every matrix of as many layers as are on their way at a time, and for embedding
    and head. Layers that differ take those of the largest. Norms, biases and small matrices stay in
    memory and need none. Section V-A: 2.46 GiB, and 9.14 of one size, for Qwen2.5-7B.
    """
    positive("blocks_in_flight", blocks_in_flight)
    counts: Counter[int] = Counter()
    for weight in shape.layer_weights(shape.layers - 1):
        counts[_WEIGHT_BYTES * weight.elements] += min(blocks_in_flight, shape.layers)
    counts[_WEIGHT_BYTES * shape.vocabulary * shape.hidden] += 1 if shape.tied else 2
    sizes = (size for size in sorted(counts, reverse=True) if size >= _SMALLEST_BYTES)
    return WeightBuffers({size: counts[size] for size in sizes})


def host_memory(shape: TransformerShape, system: System) -> dict[str, int]:
    """Return the bytes of host memory of a run by their use; see [Note: parts of the peak].

    "zero-infinity" and "memascend" are as the paper describes them; "streamed" updates each layer
    during backward (Fuyou, section 4.3), so that gradients of the whole model never wait.
    """
    buffers = weight_buffers(shape)
    largest = max(item.elements for item in shape.weights())
    weight, state = _WEIGHT_BYTES * largest, _STATE_BYTES * largest
    gradients = _GRADIENT_BYTES * shape.parameters
    kept = {"states": _STATE_BUFFERS * state, "swap-out": _SWAP_BUFFERS * weight}
    if system == "streamed":
        layer = _WEIGHT_BYTES * shape.layer_parameters
        return {"gradients of a layer": layer, "weights in flight": buffers.exact_bytes, **kept}
    if system == "memascend":
        return {"gradients": gradients, "weights in flight": buffers.exact_bytes, **kept}
    weights = sum(buffers.counts.values()) + _SWAP_BUFFERS
    rounding = _rounding(gradients) + weights * _rounding(weight)
    return {
        "gradients": gradients,
        "overflow check": int(_CHECK_SHARE * gradients),
        "weights in flight": buffers.one_size_bytes,
        **kept,
        "rounding of pinned buffers": rounding + _STATE_BUFFERS * _rounding(state),
    }


def _rounding(nbytes: int) -> int:
    """Return the bytes that rounding up to a power of two adds."""
    return (1 << (nbytes - 1).bit_length()) - nbytes
