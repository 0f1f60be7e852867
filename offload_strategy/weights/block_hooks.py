"""What is done to a model whose weights are streamed: hooks around the forward of each block."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_strategy.weights.block_order import StreamedBlock


class Turns(Protocol):
    """Who brings the weights of a block, and lets them go."""

    def begin(self, block: StreamedBlock) -> None:
        """A block computes: its weights must be here."""

    def end(self, block: StreamedBlock) -> None:
        """A block has computed, or raised; also when it never began."""

    def begin_model(self, attached: Attached) -> None:
        """A model is called, and no other call of it is under way on this thread."""


@dataclass(eq=False)
class Attached:
    """A model, and what was done to it."""

    model: weakref.ref[nn.Module]
    blocks: list[StreamedBlock] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)


class BlockHooks:
    """Forward hooks of one block. A copy of them does nothing: it belongs to one engine."""

    def __init__(self, turns: Turns | None = None, block: StreamedBlock | None = None) -> None:
        self._turns = None if turns is None else weakref.ref(turns)
        self._block = block

    def before(self, module: nn.Module, args: Any) -> None:
        """The block is about to compute."""
        turns = None if self._turns is None else self._turns()
        if turns is not None and self._block is not None:
            turns.begin(self._block)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The block has computed, or raised; also when it never began."""
        turns = None if self._turns is None else self._turns()
        if turns is not None and self._block is not None:
            turns.end(self._block)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


class ModelHook:
    """Forward pre-hook of a model. A copy of it does nothing: it belongs to one engine."""

    def __init__(self, turns: Turns | None = None, attached: Attached | None = None) -> None:
        self._turns = None if turns is None else weakref.ref(turns)
        self._attached = attached

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Torch runs "always called" hooks only after subclasses of Exception, not after Ctrl-C."""
        turns = None if self._turns is None else self._turns()
        if turns is not None and self._attached is not None and _calls_under_way(module) == 1:
            turns.begin_model(self._attached)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _calls_under_way(module: nn.Module) -> int:
    """How many calls of `module` are on this thread's stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


_CALL_CODE = nn.Module._call_impl.__code__
