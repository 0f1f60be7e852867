"""Which weights are in memory, and which go when others come.

[Note: who goes]
Between its turns a block stays while no other needs the room; of those in memory the one that was
needed longest ago goes first, unless it is expected next. Weights that were touched out of turn are
strays: a few of them may stay beside the one that is touched now.
"""

from __future__ import annotations

from offload_strategy.units import MiB
from offload_strategy.weights.block_order import BlockOrder, StreamedBlock
from offload_strategy.weights.streamed_weight import StreamedWeight

#: Strays that may stay beside the one that is touched now.
_STRAY_BYTES = 64 * MiB


class Residents:
    """The weights in memory; its user holds a lock.

    Args:
        most: blocks in memory at a time, or on their way there.
    """

    def __init__(self, most: int) -> None:
        self.order = BlockOrder()
        self._most = most
        # Blocks with weights in memory, the one that was needed longest ago first.
        self._blocks: dict[StreamedBlock, None] = {}
        # The one that was touched longest ago first.
        self._strays: dict[StreamedWeight, None] = {}
        self._by_storage: dict[int, StreamedWeight] = {}

    # ------------------------------------------------------------------ coming
    def needed(self, block: StreamedBlock, *, backward: bool) -> None:
        """A block has its turn now."""
        self.order.needed(block, backward=backward)
        self._blocks.pop(block, None)
        self._blocks[block] = None

    def add(self, block: StreamedBlock) -> None:
        """Some of a block's weights are here, or will be."""
        self._blocks[block] = None

    def bring(self, block: StreamedBlock, only: StreamedWeight | None = None) -> None:
        """Bring the weights of a block that is needed now, or one of them."""
        self.make_room(max(1, self._most - 1), keep=block)
        for weight in block.weights:
            weight.fetch()
        for weight in block.weights if only is None else [only]:
            weight.bring()
        for weight in block.weights:
            if weight.here:
                self._by_storage[weight.storage_key] = weight

    def fetch_ahead(self) -> None:
        """Begin to load what is expected next, as far as there is memory for it."""
        for block in self.order.following(self._most - 1):
            for weight in block.weights:
                if not weight.fetch():
                    return

    def stray(self, weight: StreamedWeight) -> None:
        """A weight is touched out of turn, and others make room for it."""
        self._strays.pop(weight, None)
        self._strays[weight] = None
        self.send_strays(weight)

    def whose(self, storage_key: int) -> StreamedWeight | None:
        """The weight whose bytes are in a storage, if there is one."""
        weight = self._by_storage.get(storage_key)
        return weight if weight is not None and weight.lies_in(storage_key) else None

    # ------------------------------------------------------------------ going
    def make_room(self, most: int | None = None, keep: StreamedBlock | None = None) -> None:
        """Let blocks go until no more than so many are here, or as many as may."""
        most = self._most if most is None else most
        soon = list(self.order.following(max(0, most - 1)))
        rest = [block for block in self._blocks if block is not keep and block not in soon]
        for block in rest:
            if len(self._blocks) <= most:
                return
            self.send(block)

    def send(self, block: StreamedBlock) -> None:
        """Let a block's weights go, as far as they may."""
        gone = True
        for weight in block.weights:
            # One that belongs to another block that is at work stays.
            gone &= self._send(weight)
        if gone:
            self._blocks.pop(block, None)

    def send_strays(self, keep: StreamedWeight | None = None) -> None:
        """Let weights go that came out of turn; beside one that is needed, some may stay."""
        room = 0 if keep is None else max(keep.nbytes, _STRAY_BYTES)
        held = sum(weight.nbytes for weight in self._strays)
        for weight in list(self._strays):
            if held <= room:
                return
            if weight is not keep and self._send(weight):
                held -= weight.nbytes
                del self._strays[weight]

    def _send(self, weight: StreamedWeight) -> bool:
        """Let a weight go if it may; whether it is away."""
        if weight.parameter is None:
            return True
        if weight.here and weight.may_go():
            self._by_storage.pop(weight.storage_key, None)
            weight.send()
        return not weight.here

    def forget_block(self, block: StreamedBlock) -> None:
        """It is streamed no more."""
        self._blocks.pop(block, None)

    def forget_weight(self, weight: StreamedWeight) -> None:
        """It is streamed no more."""
        self._strays.pop(weight, None)
        for key in [key for key, known in self._by_storage.items() if known is weight]:
            del self._by_storage[key]
