"""Streamed blocks: their forward hooks, and the learned order in which they are needed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_strategy.weights.streamed_weight import StreamedWeight


@dataclass(eq=False)
class StreamedBlock:
    """Weights that are loaded and offloaded together; does not keep the model alive.

    Args:
        name: name of the module.
        weights: its streamed weights; tied weights are in several blocks.
    """

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


class ResidencyOwner(Protocol):
    """Loads and releases the weights of a block."""

    def enter_block(self, block: StreamedBlock) -> None:
        """Load and acquire the weights of a block."""

    def exit_block(self, block: StreamedBlock) -> None:
        """Release the weights of a block."""

    def enter_model(self, attached: AttachedModel) -> None:
        """Note the outermost call of a model on this thread."""


@dataclass(eq=False)
class AttachedModel:
    """A model with its blocks and hooks."""

    model: weakref.ref[nn.Module]
    blocks: list[StreamedBlock] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)


class BlockHooks:
    """Forward hooks of one block. A copy does nothing, because hooks belong to one engine."""

    def __init__(
        self, residency: ResidencyOwner | None = None, block: StreamedBlock | None = None
    ) -> None:
        self._residency = None if residency is None else weakref.ref(residency)
        self._block = block

    def before(self, module: nn.Module, args: Any) -> None:
        """Run before the block computes."""
        residency = None if self._residency is None else self._residency()
        if residency is not None and self._block is not None:
            residency.enter_block(self._block)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The block has computed, or raised; also when it never began."""
        residency = None if self._residency is None else self._residency()
        if residency is not None and self._block is not None:
            residency.exit_block(self._block)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


class ModelHook:
    """Forward pre-hook of a model. A copy does nothing, because hooks belong to one engine."""

    def __init__(
        self, residency: ResidencyOwner | None = None, attached: AttachedModel | None = None
    ) -> None:
        self._residency = None if residency is None else weakref.ref(residency)
        self._attached = attached

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Exit leftover blocks: torch does not run always_call hooks after Ctrl-C."""
        residency = None if self._residency is None else self._residency()
        if residency is not None and self._attached is not None and _calls_under_way(module) == 1:
            residency.enter_model(self._attached)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _calls_under_way(module: nn.Module) -> int:
    """Count the calls of a module on this thread's stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


_CALL_CODE = nn.Module._call_impl.__code__
