"""The calls of blocks within a forward pass: which items are theirs, and how long each computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class BlockCall:
    """A call of a block.

    Args:
        name: of the block.
        first: number of the first item that is saved within.
        begins_at: time (`time.perf_counter`), less that for which forward had waited.
        input_bytes: of tensors that it was given, and that no block before it was.
        end: number of the first item after it.
        ends_at: as `begins_at`; None while it runs, or if it raised.
    """

    name: str
    first: int
    begins_at: float
    input_bytes: int
    end: int = 0
    ends_at: float | None = None


class BlockCalls:
    """Of one forward pass, in order."""

    def __init__(self) -> None:
        self.all: list[BlockCall] = []
        self._inputs: set[int] = set()

    def begin(self, name: str, inputs: Iterable[torch.Tensor], first: int, at: float) -> None:
        """A block is called; see `BlockCall`."""
        self.all.append(BlockCall(name, first, at, self._new_bytes(inputs)))

    def end(self, name: str, end: int, at: float) -> None:
        """A block has returned, if it was called last: blocks do not contain each other."""
        call = self.all[-1] if self.all else None
        if call is not None and call.name == name:
            call.end, call.ends_at = end, at

    def _new_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        nbytes = 0
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # without a storage of its own
                continue
            key = int(storage._cdata)
            if key not in self._inputs:
                self._inputs.add(key)
                nbytes += storage.nbytes()
        return nbytes
