"""The calls of blocks within a forward pass: their items and their computing times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class BlockCall:
    """A call of a block.

    Args:
        name: Name of the block.
        first: Number of the first item that is saved within the block.
        begins_at: Start (`time.perf_counter`), minus the time that forward had waited.
        input_bytes: Bytes of its input tensors that are not inputs of an earlier block.
        end: Number of the first item after the block.
        ends_at: End, as `begins_at`; None while it runs, or if it raised.
    """

    name: str
    first: int
    begins_at: float
    input_bytes: int
    end: int = 0
    ends_at: float | None = None


class BlockCalls:
    """The calls of one forward pass, in order."""

    def __init__(self) -> None:
        self.all: list[BlockCall] = []
        self._inputs: set[int] = set()

    def begin(self, name: str, inputs: Iterable[torch.Tensor], first: int, at: float) -> None:
        """Record the start of a call; see `BlockCall`."""
        self.all.append(BlockCall(name, first, at, self._new_bytes(inputs)))

    def end(self, name: str, end: int, at: float) -> None:
        """Record the end of the last call: blocks do not contain each other."""
        call = self.all[-1] if self.all else None
        if call is not None and call.name == name:
            call.end, call.ends_at = end, at

    def _new_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        nbytes = 0
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # it has no storage
                continue
            key = int(storage._cdata)
            if key not in self._inputs:
                self._inputs.add(key)
                nbytes += storage.nbytes()
        return nbytes
