"""The shape census: how many staging buffers of which size a model needs.

A buffer for every weight of one block in flight, each exactly as large as its weight, instead of
as many buffers of the largest weight's size (MemAscend, section on the adaptive buffer pool).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

#: The first numbered component of a parameter's name is its block: "model.layers.12.mlp.up.weight".
_BLOCK = re.compile(r"^(?P<stack>.*?)\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A parameter by name, with its size in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Buffers of one size.

    Args:
        nbytes: bytes of each.
        buffers: how many.
        example: name of a parameter that uses them.
    """

    nbytes: int
    buffers: int
    example: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.buffers


@dataclass(frozen=True, slots=True)
class Census:
    """What `shape_census` found, largest class first."""

    classes: tuple[SizeClass, ...]

    @property
    def exact_bytes(self) -> int:
        """Bytes of one exact-size pool per class."""
        return sum(group.total_bytes for group in self.classes)

    @property
    def one_size_bytes(self) -> int:
        """Bytes of as many buffers, all of the largest weight's size."""
        if not self.classes:
            return 0
        return max(group.nbytes for group in self.classes) * sum(
            group.buffers for group in self.classes
        )


def shape_census(
    parameters: Iterable[NamedSize], blocks_in_flight: int = 1, min_bytes: int = 1 << 20
) -> Census:
    """Count the buffers that `blocks_in_flight` blocks need, by size.

    Args:
        parameters: the model's parameters, tied ones once.
        blocks_in_flight: blocks of a repeated stack that are in memory at a time. What belongs to
            no stack (embedding, head) gets one buffer each.
        min_bytes: smaller parameters (norms, biases) stay in memory and need no buffer.
    """
    inside: defaultdict[tuple[str, int], Counter[tuple[str, int]]] = defaultdict(Counter)
    single: Counter[int] = Counter()
    examples: dict[int, str] = {}
    for parameter in parameters:
        if parameter.nbytes < min_bytes:
            continue
        examples.setdefault(parameter.nbytes, parameter.name)
        found = _BLOCK.match(parameter.name)
        if found is None:
            single[parameter.nbytes] += 1
        else:
            stack = found["stack"]
            inside[stack, int(found["index"])][stack, parameter.nbytes] += 1
    # Blocks of a stack may differ (mixture of experts beside dense ones): take the largest need.
    per_block: Counter[tuple[str, int]] = Counter()
    for needs in inside.values():
        per_block |= needs
    blocks = Counter(stack for stack, _ in inside)
    counts = single.copy()
    for (stack, nbytes), count in per_block.items():
        counts[nbytes] += count * min(blocks_in_flight, blocks[stack])
    return Census(
        tuple(
            SizeClass(nbytes, counts[nbytes], examples[nbytes])
            for nbytes in sorted(counts, reverse=True)
        )
    )
