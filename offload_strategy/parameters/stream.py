"""Streaming: the weights of a block are in memory while it computes, and little longer.

[Note: who has its turn]
A block's turn is its forward (again inside backward, where it is recomputed) and every update of
its weights. What autograd saves of a weight is where it lies in it, so backward finds the bytes
wherever they are by then. Between turns the weights stay while no other block needs the room: of
the blocks in memory the one that is expected last goes first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.heap import Heap, Tier
from offload_strategy.parameters.blocks import Block, cut_into_blocks
from offload_strategy.parameters.order import BlockOrder
from offload_strategy.parameters.saved import SavedWeight
from offload_strategy.parameters.weights import StreamedWeight


class WeightStream:
    """The streamed weights of one engine.

    Args:
        heap: takes the bytes.
        tiers: where they may go, in order.
        blocks_in_flight: in memory at a time, or on their way there.
        min_bytes: smaller parameters stay in memory.
    """

    def __init__(
        self, heap: Heap, tiers: Sequence[Tier], *, blocks_in_flight: int, min_bytes: int
    ) -> None:
        self._heap = heap
        self._tiers = list(tiers)
        self._most = blocks_in_flight
        self._min_bytes = min_bytes
        self._order = BlockOrder()
        self._lock = threading.RLock()
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._blocks: dict[int, list[Block]] = {}
        self._homes: dict[int, list[Block]] = {}  # id of a weight -> blocks
        self._by_storage: dict[int, StreamedWeight] = {}
        # Blocks with weights in memory, the one that was needed longest ago first.
        self._here: dict[Block, None] = {}
        self._handles: dict[int, list[RemovableHandle]] = {}
        #: Weights that were touched out of turn.
        self.touches = 0

    # ------------------------------------------------------------------ models
    def attach(self, model: nn.Module) -> None:
        """Send a model's weights out, and bring them whenever a block computes."""
        blocks = cut_into_blocks(model, min_bytes=self._min_bytes)
        handles: list[RemovableHandle] = []
        self._blocks[id(model)], self._handles[id(model)] = blocks, handles
        for block in blocks:
            for name, parameter in block.parameters.items():
                weight = self._weights.get(parameter)
                if weight is None:
                    touched = _weakly(self._touched)
                    weight = StreamedWeight(name, parameter, self._heap, self._tiers, touched)
                    self._weights[parameter] = weight
                self._homes.setdefault(id(weight), []).append(block)
            self._here[block] = None
            hook = _BlockHooks(self, block)
            handles.append(block.module.register_forward_pre_hook(hook.before, prepend=True))
            handles.append(block.module.register_forward_hook(hook.after, always_call=True))
        with self._lock:
            self._make_room(0)

    def detach(self, model: nn.Module, *, restore: bool = True) -> None:
        """Bring a model's weights back and leave it alone."""
        for handle in self._handles.pop(id(model), ()):
            handle.remove()
        for block in self._blocks.pop(id(model), ()):
            self._here.pop(block, None)
            for parameter in block.parameters.values():
                weight = self._weights.pop(parameter, None)
                if weight is not None:
                    self._homes.pop(id(weight), None)
                    weight.close(restore=restore)
        self._by_storage.clear()

    # ------------------------------------------------------------------ turns
    def begin(self, block: Block) -> None:
        """A block computes: its weights must be here."""
        with self._lock:
            self._bring(block)
            for weight in self._of(block):
                weight.begin_turn()
                self._by_storage[weight.storage_key] = weight
            self._fetch_ahead()

    def end(self, block: Block) -> None:
        """A block has computed."""
        with self._lock:
            for weight in self._of(block):
                weight.end_turn()
            if block not in self._order.following(self._most - 1):
                self._send(block)

    @contextmanager
    def held(self, parameters: Iterable[torch.Tensor], *, changes: bool) -> Iterator[None]:
        """The weights among some parameters are here.

        Args:
            parameters: also such that are not streamed.
            changes: whether their bytes are changed within; version counters do not tell, as fused
                kernels leave them alone.
        """
        weights = [weight for p in parameters if (weight := self._weights.get(p)) is not None]
        if not weights:
            yield
            return
        with self._lock:
            begun = []
            try:
                for weight in weights:
                    self._here[self._homes[id(weight)][0]] = None
                    weight.begin_turn()
                    begun.append(weight)
                    if changes:
                        weight.note_change()
                yield
            finally:
                for weight in begun:
                    weight.end_turn()
                self._make_room(self._most)

    def start_over(self) -> None:
        """A step has ended, or a new pass begins: autograd saved nothing that is still needed."""
        with self._lock:
            for weight in list(self._weights.values()):
                weight.bound = False
            self._make_room(self._most)

    # ------------------------------------------------------------------ autograd
    def save(self, tensor: torch.Tensor) -> SavedWeight | None:
        """What stands for a saved tensor, if it is a streamed weight or a view of one."""
        if not self._by_storage:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        weight = self._by_storage.get(int(storage._cdata))
        if weight is None or not weight.here or weight.storage_key != int(storage._cdata):
            return None
        if tensor.dtype != weight.form.dtype:
            return None  # another view of the bytes: while that lives they stay
        return SavedWeight(tensor, weight, self._needed)

    def _needed(self, weight: StreamedWeight) -> torch.Tensor:
        with self._lock:
            block = self._homes[id(weight)][0]
            if not weight.here:
                self._bring(block, only=weight)
            else:
                self._note(block)
            self._fetch_ahead()
            return weight.values()

    # ------------------------------------------------------------------ coming and going
    def _of(self, block: Block) -> list[StreamedWeight]:
        return [self._weights[parameter] for parameter in block.parameters.values()]

    def _note(self, block: Block) -> None:
        self._order.needed(block, training=torch._C._current_graph_task_id() != -1)
        self._here.pop(block, None)
        self._here[block] = None

    def _bring(self, block: Block, only: StreamedWeight | None = None) -> None:
        self._note(block)
        self._make_room(max(1, self._most - 1), keep=block)
        for weight in self._of(block):
            weight.fetch()
        for weight in self._of(block) if only is None else [only]:
            weight.bring()

    def _fetch_ahead(self) -> None:
        for block in self._order.following(self._most - 1):
            for weight in self._of(block):
                if not weight.fetch():
                    return

    def _make_room(self, most: int, keep: Block | None = None) -> None:
        """Let blocks go until no more than so many are here."""
        soon = list(self._order.following(max(0, most - 1)))
        rest = [block for block in self._here if block is not keep and block not in soon]
        for block in rest:
            if len(self._here) <= most:
                return
            self._send(block)

    def _send(self, block: Block) -> None:
        """Let a block's weights go, as far as they may."""
        gone = True
        for weight in self._of(block):
            if not weight.here:
                continue
            key = weight.storage_key
            # One that belongs to another block that is at work stays.
            if weight.may_go():
                self._by_storage.pop(key, None)
                weight.send()
            else:
                gone = False
        if gone:
            self._here.pop(block, None)

    def _touched(self, weight: StreamedWeight) -> None:
        self.touches += 1
        with self._lock:
            block = self._homes[id(weight)][0]
            if not weight.here:
                self._make_room(self._most, keep=block)
                weight.bring()
            if torch.is_grad_enabled():
                # Autograd may save the parameter itself, and would find what stands for it.
                weight.bound = True
            self._here[block] = None


class _BlockHooks:
    """Forward hooks of one block. A copy of them does nothing: it belongs to one engine."""

    def __init__(self, stream: WeightStream | None = None, block: Block | None = None) -> None:
        self._stream = None if stream is None else weakref.ref(stream)
        self._block = block

    def before(self, module: nn.Module, args: Any) -> None:
        """The block is about to compute."""
        stream = None if self._stream is None else self._stream()
        if stream is not None and self._block is not None:
            stream.begin(self._block)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The block has computed, or raised."""
        stream = None if self._stream is None else self._stream()
        if stream is not None and self._block is not None:
            stream.end(self._block)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _weakly(method: Any) -> Any:
    reference = weakref.WeakMethod(method)

    def call(weight: StreamedWeight) -> None:
        if (alive := reference()) is not None:
            alive(weight)

    return call
