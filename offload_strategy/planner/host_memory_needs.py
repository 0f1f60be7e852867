"""Peak host memory of training with states on SSDs, and what it consists of (MemAscend).

[Note: what the peak consists of]
MemAscend's section V-A gives the parts for Qwen2.5-7B. They, and the totals of all four models of
its figure 13, follow from these buffers:

    gradients         one flat buffer, 4 bytes a parameter (section III-C)
    overflow check    1.25 times as much while isinf and isnan look at it (section III-C)
    weights           as many buffers as the blocks in flight have weights: of the largest one's
                      size in ZeRO-Infinity, of their own size in MemAscend (section IV-B)
    states, swap-out  5 float32 buffers and 1 half-precision one of the largest weight's size. The
                      paper says 11.17 GiB for both without their number: 5 and 1 give 11.166 GiB
    rounding          PyTorch rounds each pinned buffer up to the next power of two (section III-B);
                      it is listed beside the buffers

Not counted is the process itself: interpreter, libraries, contexts of the devices. The paper's
measured totals are above the sums by that, 1.6 to 1.8 GiB for every model and for both systems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from offload_strategy.errors import ConfigError
from offload_strategy.planner.shape_census import Census, NamedSize, shape_census
from offload_strategy.planner.transformer_shape import TransformerShape, positive
from offload_strategy.units import format_size

System = Literal["zero-infinity", "memascend", "streamed"]

_GRADIENT_BYTES = 4
_STATE_BYTES = 4
_WEIGHT_BYTES = 2
#: Of the flat buffer, while the check runs: a copy, and a byte or less for each value.
_CHECK_SHARE = 1.25
#: See [Note: what the peak consists of].
_STATE_BUFFERS = 5
_SWAP_BUFFERS = 1


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory by what they are for; `str` makes a table.

    Args:
        system: whose buffers these are.
        parts: bytes by name.
    """

    system: System
    parts: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """All together, without the process itself."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """A table in Markdown."""
        lines = [f"| {self.system} | host memory |", "|---|---|"]
        rows = [*self.parts.items(), ("peak", self.peak_bytes)]
        return "\n".join([*lines, *(f"| {name} | {format_size(size)} |" for name, size in rows)])


def weight_buffers(shape: TransformerShape, blocks_in_flight: int = 1) -> Census:
    """Buffers in which weights pass through the host, in half precision.

    `Census.exact_bytes` is MemAscend's adaptive pool, `Census.one_size_bytes` what ZeRO-Infinity
    takes (section V-A: 2.46 and 9.14 GiB for Qwen2.5-7B).

    Args:
        shape: of the model.
        blocks_in_flight: layers whose weights are on their way at a time.

    Raises:
        ConfigError: if that is not above 0.
    """
    positive("blocks_in_flight", blocks_in_flight)
    sizes = [NamedSize(item.name, item.elements * _WEIGHT_BYTES) for item in shape.weights()]
    return shape_census(sizes, blocks_in_flight)


def host_memory(
    shape: TransformerShape,
    system: System,
    *,
    blocks_in_flight: int = 1,
    checks_overflow: bool = True,
    checkpoint_bytes: int = 0,
) -> HostMemory:
    """Add up the host memory of a run; see [Note: what the peak consists of].

    Args:
        shape: of the model.
        system: "zero-infinity" and "memascend" as the paper has them; "streamed" updates each layer
            during backward (Fuyou, section 4.3), so that no gradients of the whole model wait.
        blocks_in_flight: layers whose weights are on their way at a time.
        checks_overflow: whether gradients are checked, as training in float16 needs.
        checkpoint_bytes: inputs of layers that wait in host memory, on all devices together.

    Raises:
        ConfigError: for an unknown system, or a negative number of bytes.
    """
    if system not in get_args(System):
        raise ConfigError(
            f"host memory: system is {system!r}; give one of {', '.join(get_args(System))}"
        )
    if checkpoint_bytes < 0:
        raise ConfigError(f"host memory: checkpoint_bytes is {checkpoint_bytes}; give 0 or more")
    census = weight_buffers(shape, blocks_in_flight)
    largest = max(item.elements for item in shape.weights())
    gradients = _GRADIENT_BYTES * shape.parameters
    parts: dict[str, int] = {}
    if system == "streamed":
        parts["gradients of a layer"] = _WEIGHT_BYTES * shape.layer_parameters
    else:
        parts["gradients"] = gradients
    if system == "zero-infinity" and checks_overflow:
        parts["overflow check"] = int(_CHECK_SHARE * gradients)
    exact = system != "zero-infinity"
    parts["weights in flight"] = census.exact_bytes if exact else census.one_size_bytes
    parts["states"] = _STATE_BUFFERS * _STATE_BYTES * largest
    parts["swap-out"] = _SWAP_BUFFERS * _WEIGHT_BYTES * largest
    if not exact:
        weights = sum(group.buffers for group in census.classes)
        parts["rounding of pinned buffers"] = (
            _rounding(gradients)
            + (weights + _SWAP_BUFFERS) * _rounding(_WEIGHT_BYTES * largest)
            + _STATE_BUFFERS * _rounding(_STATE_BYTES * largest)
            + _rounding(checkpoint_bytes)
        )
    if checkpoint_bytes:
        parts["inputs of layers"] = checkpoint_bytes
    return HostMemory(system, MappingProxyType(parts))


def _rounding(nbytes: int) -> int:
    """Bytes that rounding up to a power of two adds."""
    return (1 << (nbytes - 1).bit_length()) - nbytes if nbytes else 0
