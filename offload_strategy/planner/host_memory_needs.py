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

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from offload_strategy.errors import ConfigError
from offload_strategy.planner.transformer_shape import TransformerShape, positive
from offload_strategy.units import format_size

System = Literal["zero-infinity", "memascend", "streamed"]

_GRADIENT_BYTES = 4
_STATE_BYTES = 4
_WEIGHT_BYTES = 2
#: Of the flat buffer, while the overflow check runs: a copy, and up to a byte for each value.
_CHECK_SHARE = 1.25
#: See [Note: parts of the peak].
_STATE_BUFFERS = 5
_SWAP_BUFFERS = 1
#: The first numbered component of a parameter's name is its block: "model.layers.12.mlp.up.weight".
_BLOCK = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.")


# ---------------------------------------------------------------------------- staging buffers
@dataclass(frozen=True, slots=True)
class NamedSize:
    """A parameter by name, with its size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Staging buffers of one size.

    Args:
        nbytes: Bytes of each buffer.
        buffers: Number of buffers.
        example: Name of a parameter that uses them.
    """

    nbytes: int
    buffers: int
    example: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.buffers


@dataclass(frozen=True, slots=True)
class StagingBuffers:
    """The staging buffers that a model's weights need, the largest size first."""

    classes: tuple[SizeClass, ...]

    @property
    def exact_bytes(self) -> int:
        """Bytes with one pool of buffers for each size."""
        return sum(group.total_bytes for group in self.classes)

    @property
    def one_size_bytes(self) -> int:
        """Bytes of as many buffers that all have the largest weight's size."""
        largest = max((group.nbytes for group in self.classes), default=0)
        return largest * sum(group.buffers for group in self.classes)


def staging_buffers(
    parameters: Iterable[NamedSize], blocks_in_flight: int = 1, min_bytes: int = 1 << 20
) -> StagingBuffers:
    """Count the buffers that `blocks_in_flight` blocks need, by size.

    There is a buffer for every weight of the blocks in flight, exactly as large as its weight,
    instead of as many buffers of the largest weight's size (MemAscend, section IV-B).

    Args:
        parameters: The model's parameters, tied ones once.
        blocks_in_flight: Blocks of a repeated stack that are in memory at a time. Parameters of no
            stack (embedding, head) get one buffer each.
        min_bytes: Smaller parameters (norms, biases) stay in memory and need no buffer.
    """
    stacked: defaultdict[tuple[str, int], Counter[tuple[str, int]]] = defaultdict(Counter)
    counts: Counter[int] = Counter()
    examples: dict[int, str] = {}
    for parameter in parameters:
        if parameter.nbytes < min_bytes:
            continue
        examples.setdefault(parameter.nbytes, parameter.name)
        match = _BLOCK.match(parameter.name)
        if match is None:
            counts[parameter.nbytes] += 1
        else:
            stack = match["stack"]
            stacked[stack, int(match["index"])][stack, parameter.nbytes] += 1
    # Blocks of a stack may differ (mixture of experts next to dense ones): take the largest need.
    per_block: Counter[tuple[str, int]] = Counter()
    for needs in stacked.values():
        per_block |= needs
    blocks = Counter(stack for stack, _ in stacked)
    for (stack, nbytes), count in per_block.items():
        counts[nbytes] += count * min(blocks_in_flight, blocks[stack])
    sizes = sorted(counts, reverse=True)
    return StagingBuffers(tuple(SizeClass(size, counts[size], examples[size]) for size in sizes))


def weight_buffers(shape: TransformerShape, blocks_in_flight: int = 1) -> StagingBuffers:
    """Return the buffers through which weights pass in half precision.

    `exact_bytes` of the result is MemAscend's adaptive pool, `one_size_bytes` what ZeRO-Infinity
    takes (section V-A: 2.46 and 9.14 GiB for Qwen2.5-7B).

    Args:
        shape: Shape of the model.
        blocks_in_flight: Layers whose weights are on their way at a time.

    Raises:
        ConfigError: If that is not above 0.
    """
    positive("blocks_in_flight", blocks_in_flight)
    sizes = [NamedSize(item.name, item.elements * _WEIGHT_BYTES) for item in shape.weights()]
    return staging_buffers(sizes, blocks_in_flight)


# ---------------------------------------------------------------------------- the peak
@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory by their use; `str` gives a table.

    Args:
        system: The system whose buffers these are.
        parts: Bytes by name.
    """

    system: System
    parts: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes of all parts, without the process itself."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """A table in Markdown."""
        lines = [f"| {self.system} | host memory |", "|---|---|"]
        rows = [*self.parts.items(), ("peak", self.peak_bytes)]
        return "\n".join([*lines, *(f"| {name} | {format_size(size)} |" for name, size in rows)])


def host_memory(
    shape: TransformerShape,
    system: System,
    *,
    blocks_in_flight: int = 1,
    checks_overflow: bool = True,
    checkpoint_bytes: int = 0,
) -> HostMemory:
    """Add up the host memory of a run; see [Note: parts of the peak].

    Args:
        shape: Shape of the model.
        system: "zero-infinity" and "memascend" as the paper describes them; "streamed" updates each
            layer during backward (Fuyou, section 4.3), so that gradients of the whole model never
            wait.
        blocks_in_flight: Layers whose weights are on their way at a time.
        checks_overflow: Whether gradients are checked, as training in float16 requires.
        checkpoint_bytes: Inputs of layers in host memory, on all devices together.

    Raises:
        ConfigError: For an unknown system, or a negative number of bytes.
    """
    if system not in get_args(System):
        raise ConfigError(
            f"host memory: system is {system!r}; give one of {', '.join(get_args(System))}"
        )
    if checkpoint_bytes < 0:
        raise ConfigError(f"host memory: checkpoint_bytes is {checkpoint_bytes}; give 0 or more")
    buffers = weight_buffers(shape, blocks_in_flight)
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
    parts["weights in flight"] = buffers.exact_bytes if exact else buffers.one_size_bytes
    parts["states"] = _STATE_BUFFERS * _STATE_BYTES * largest
    parts["swap-out"] = _SWAP_BUFFERS * _WEIGHT_BYTES * largest
    if not exact:
        weights = sum(group.buffers for group in buffers.classes)
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
    """Return the bytes that rounding up to a power of two adds."""
    return (1 << (nbytes - 1).bit_length()) - nbytes if nbytes else 0
