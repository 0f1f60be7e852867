"""Which weights are in memory, and which are offloaded to make room.

[Note: eviction of weights]
A block stays in memory while no other block needs the room. The least recently used block is
offloaded first, unless it is among the next blocks. Weights that are accessed outside their blocks
are tracked apart: a few of them may stay besides the one that is accessed now.
"""

from __future__ import annotations

from offload_strategy.units import MiB
from offload_strategy.weights.streamed_block import BlockOrder, StreamedBlock
from offload_strategy.weights.streamed_weight import StreamedWeight

#: Bytes of weights accessed outside their blocks that may stay besides the current one.
_ACCESSED_BYTES = 64 * MiB


class ResidentWeights:
    """The weights in memory. The caller holds a lock.

    Args:
        most: maximum number of blocks in memory or being loaded.
    """

    def __init__(self, most: int) -> None:
        self.order = BlockOrder()
        self._most = most
        # Blocks with weights in memory, least recently used first.
        self._blocks: dict[StreamedBlock, None] = {}
        # Weights accessed outside their blocks, least recently accessed first.
        self._accessed: dict[StreamedWeight, None] = {}
        self._by_storage: dict[int, StreamedWeight] = {}

    # ------------------------------------------------------------------ loading
    def mark_needed(self, block: StreamedBlock, *, backward: bool) -> None:
        """Record that a block is needed now."""
        self.order.record(block, backward=backward)
        self._blocks.pop(block, None)
        self._blocks[block] = None

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

    # ------------------------------------------------------------------ offloading
    def make_room(self, most: int | None = None, keep: StreamedBlock | None = None) -> None:
        """Offload blocks until at most `most` are in memory, as far as possible."""
        most = self._most if most is None else most
        soon = list(self.order.next_blocks(max(0, most - 1)))
        rest = [block for block in self._blocks if block is not keep and block not in soon]
        for block in rest:
            if len(self._blocks) <= most:
                return
            self.offload(block)

    def offload(self, block: StreamedBlock) -> None:
        """Offload the weights of a block that can be offloaded."""
        gone = True
        for weight in block.weights:
            # A tied weight stays while another block computes with it.
            gone &= self._offload_weight(weight)
        if gone:
            self._blocks.pop(block, None)

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
        """Stop tracking it."""
        self._blocks.pop(block, None)

    def forget_weight(self, weight: StreamedWeight) -> None:
        """Stop tracking it."""
        self._accessed.pop(weight, None)
        for key in [key for key, known in self._by_storage.items() if known is weight]:
            del self._by_storage[key]
