"""The order in which blocks are needed, learned while they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload_strategy.weights.streamed_weight import StreamedWeight


@dataclass(eq=False)
class StreamedBlock:
    """Weights that come and go together; does not keep the model alive.

    Args:
        name: of the module.
        weights: of it; tied ones are in several blocks.
    """

    name: str
    weights: list[StreamedWeight]

    @property
    def nbytes(self) -> int:
        """Of all of its weights."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def trained(self) -> int:
        """Bytes of those that take gradients."""
        return sum(weight.nbytes for weight in self.weights if weight.is_trained)


#: A step of more turns (generation, which no step ends) is not remembered whole.
_MOST_TURNS = 4096

_Key = tuple[StreamedBlock | None, StreamedBlock, bool]


class BlockOrder:
    """What came next the last time.

    A block, the one before it and whether backward runs tell forward from backward. Which blocks
    are used may change from one pass to the next (a mixture of experts, validation): then the last
    answer is a guess, and a wrong one costs time.
    """

    def __init__(self) -> None:
        self._next: dict[_Key, StreamedBlock] = {}
        # Of the keys, those whose block was needed again before another: now, and the last time.
        self._repeated: set[_Key] = set()
        self._again: set[_Key] = set()
        self._key: _Key | None = None
        # What was needed since the last step ended, and in the last whole step.
        self._step: list[tuple[StreamedBlock, bool]] = []
        self.last_step: list[tuple[StreamedBlock, bool]] = []

    def needed(self, block: StreamedBlock, *, backward: bool) -> None:
        """A block is needed now."""
        turn = (block, backward)
        if len(self._step) < _MOST_TURNS and (not self._step or self._step[-1] != turn):
            self._step.append(turn)
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
        """What was needed so far is what a step needs, if it had a backward pass."""
        if any(backward for _, backward in self._step):
            self.last_step = self._step
        self._step = []

    @property
    def needed_again(self) -> bool:
        """Whether the block that was needed last was needed twice in a row the last time."""
        return self._key in self._again

    def following(self, count: int) -> Iterator[StreamedBlock]:
        """The blocks that are expected next, at most `count` different ones."""
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
