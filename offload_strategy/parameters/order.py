"""The order in which blocks are needed, learned while they are."""

from __future__ import annotations

from collections.abc import Iterator

from offload_strategy.parameters.blocks import Block


class BlockOrder:
    """What came next the last time.

    Two blocks and whether gradients are computed tell forward from backward, and training from
    validation; which blocks are used may change from one pass to the next (a mixture of experts):
    then the last answer is a guess, and a wrong one costs time.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Block | None, Block | None, bool], Block] = {}
        self._before: Block | None = None
        self._latest: Block | None = None
        self._key: tuple[Block | None, Block | None, bool] | None = None

    def needed(self, block: Block, *, training: bool) -> None:
        """A block is needed now."""
        if block is self._latest:
            return
        if self._key is not None:
            self._next[self._key] = block
        self._before, self._latest = self._latest, block
        self._key = (self._before, block, training)

    def following(self, count: int) -> Iterator[Block]:
        """The blocks that are expected next, at most `count` different ones."""
        key, found = self._key, 0
        seen = {id(self._latest)}
        for _ in range(4 * count):
            block = None if key is None else self._next.get(key)
            if block is None or key is None:
                return
            if id(block) not in seen:
                seen.add(id(block))
                yield block
                found += 1
                if found == count:
                    return
            key = (key[1], block, key[2])
