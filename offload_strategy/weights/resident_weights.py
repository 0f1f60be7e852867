"""Which weights are in memory, which are offloaded to make room, and which are expected next.

[Note: eviction of weights]
A block stays in memory while no other block needs the room. The least recently used block is
offloaded first, unless it is among the next blocks. Weights that are accessed outside their blocks
are tracked apart: a few of them may stay besides the one that is accessed now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload_strategy.units import MiB
from offload_strategy.weights.streamed_weight import StreamedWeight

#: Bytes of weights accessed outside their blocks that may stay besides the current one.
_ACCESSED_BYTES = 64 * MiB


@dataclass(eq=False)
class StreamedBlock:
    """Weights that are loaded and offloaded together; tied weights are in several blocks."""

    name: str
    weights: list[StreamedWeight]

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def trained(self) -> int:
        """Bytes of the weights that require gradients."""
        return sum(weight.nbytes for weight in self.weights if weight.is_trained)


#: Longer sequences (generation, which never ends a step) are not recorded completely.
_MOST_ENTRIES = 4096

_Key = tuple[StreamedBlock | None, StreamedBlock, bool]


class BlockOrder:
    """Predicts the next blocks from what followed the last time.

    The key is a block, its predecessor and whether backward runs. The blocks in use may change from
    one pass to the next (mixture of experts, validation); a wrong prediction only costs time.
    """

    def __init__(self) -> None:
        self._next: dict[_Key, StreamedBlock] = {}
        # Keys whose block was needed twice in a row: in this pass, and in the previous one.
        self._repeated: set[_Key] = set()
        self._again: set[_Key] = set()
        self._key: _Key | None = None
        # The blocks needed since the last step ended, and those of the last whole step.
        self._step: list[tuple[StreamedBlock, bool]] = []
        self.last_step: list[tuple[StreamedBlock, bool]] = []

    def record(self, block: StreamedBlock, *, backward: bool) -> None:
        """Record that a block is needed now."""
        entry = (block, backward)
        if len(self._step) < _MOST_ENTRIES and (not self._step or self._step[-1] != entry):
            self._step.append(entry)
        key = self._key
        if key is not None:
            if key[1] is block:
                self._repeated.add(key)
                return
            self._next[key] = block
            (self._again.add if key in self._repeated else self._again.discard)(key)
            self._repeated.discard(key)
        self._key = (None if key is None else key[1], block, backward)

    def step_ended(self) -> None:
        """Keep the recorded blocks as the order of a step, if they include a backward pass."""
        if any(backward for _, backward in self._step):
            self.last_step = self._step
        self._step = []

    @property
    def is_needed_again(self) -> bool:
        """Whether the current block was needed twice in a row the last time."""
        return self._key in self._again

    def next_blocks(self, count: int) -> Iterator[StreamedBlock]:
        """Yield the blocks that are expected next, at most `count` different ones."""
        key, found = self._key, 0
        if key is None:
            return
        seen = {id(key[1])}
        for _ in range(4 * count):
            block = self._next.get(key)
            if block is None:
                return
            if id(block) not in seen:
                seen.add(id(block))
                yield block
                found += 1
                if found == count:
                    return
            key = (key[1], block, key[2])


class ResidentWeights:
    """The weights in memory: at most `most` blocks, also being loaded. The caller holds a lock."""

    def __init__(self, most: int) -> None:
        self.order = BlockOrder()
        self._most = most
        # Blocks with weights in memory, least recently used first.
        self._blocks: dict[StreamedBlock, None] = {}
        # Weights accessed outside their blocks, least recently accessed first.
        self._accessed: dict[StreamedWeight, None] = {}
        self._by_storage: dict[int, StreamedWeight] = {}

    def mark_needed(self, block: StreamedBlock, *, backward: bool) -> None:
        """Record that a block is needed now."""
        self.order.record(block, backward=backward)
        self.forget_block(block)
        self.add(block)

    def add(self, block: StreamedBlock) -> None:
        """Record that some of a block's weights are, or will be, in memory."""
        self._blocks[block] = None

    def load(self, block: StreamedBlock, only: StreamedWeight | None = None) -> None:
        """Load the weights of a block that is needed now, or one of them."""
        self.make_room(max(1, self._most - 1), keep=block)
        for weight in block.weights:
            weight.prefetch()
        for weight in block.weights if only is None else [only]:
            weight.load()
        for weight in block.weights:
            if weight.is_resident:
                self._by_storage[weight.storage_key] = weight

    def prefetch_next(self) -> None:
        """Start loading the next blocks, as far as there is memory for them."""
        for block in self.order.next_blocks(self._most - 1):
            for weight in block.weights:
                if not weight.prefetch():
                    return

    def add_accessed(self, weight: StreamedWeight) -> None:
        """Record an access to a weight outside its block, and make room for it."""
        self._accessed.pop(weight, None)
        self._accessed[weight] = None
        self.offload_accessed(weight)

    def weight_in(self, storage_key: int) -> StreamedWeight | None:
        """Return the weight whose bytes are in a storage, or None."""
        weight = self._by_storage.get(storage_key)
        return weight if weight is not None and weight.lies_in(storage_key) else None

    def make_room(self, most: int | None = None, keep: StreamedBlock | None = None) -> None:
        """Offload blocks until at most `most` are in memory, as far as possible."""
        most = self._most if most is None else most
        needed = [keep, *self.order.next_blocks(max(0, most - 1))]
        for block in [block for block in self._blocks if block not in needed]:
            if len(self._blocks) <= most:
                return
            self.offload(block)

    def offload(self, block: StreamedBlock) -> None:
        """Offload the weights of a block that can be offloaded."""
        # A tied weight stays while another block computes with it.
        if all([self._offload_weight(weight) for weight in block.weights]):
            self.forget_block(block)

    def offload_accessed(self, keep: StreamedWeight | None = None) -> None:
        """Offload weights accessed outside their blocks; some may stay besides `keep`."""
        room = 0 if keep is None else max(keep.nbytes, _ACCESSED_BYTES)
        held = sum(weight.nbytes for weight in self._accessed)
        for weight in list(self._accessed):
            if held <= room:
                return
            if weight is not keep and self._offload_weight(weight):
                held -= weight.nbytes
                del self._accessed[weight]

    def _offload_weight(self, weight: StreamedWeight) -> bool:
        """Offload a weight if possible; return whether it is offloaded."""
        if weight.parameter is None:
            return True
        if weight.is_resident and weight.can_be_offloaded():
            self._by_storage.pop(weight.storage_key, None)
            weight.offload()
        return not weight.is_resident

    def forget_block(self, block: StreamedBlock) -> None:
        """Stop tracking a block."""
        self._blocks.pop(block, None)

    def forget_weight(self, weight: StreamedWeight) -> None:
        """Stop tracking a weight."""
        self._accessed.pop(weight, None)
        for key in [key for key, known in self._by_storage.items() if known is weight]:
            del self._by_storage[key]
