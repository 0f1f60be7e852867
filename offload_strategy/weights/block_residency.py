"""Block residency: when the weights of a block must be in memory, and what autograd saves of them.

[Note: block residency]
A block's weights are acquired during its forward (again inside backward, where it is recomputed)
and during every update. Autograd saves only the position of a tensor within its weight, so backward
finds the bytes wherever they are by then. Released weights stay in memory until another block needs
the room; of the resident blocks the one that is expected last is offloaded first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.torch_support.interrupts import default_modes, keeps_grad_mode
from offload_strategy.weights.resident_weights import ResidentWeights, StreamedBlock
from offload_strategy.weights.streamed_weight import SavedWeight, StreamedWeight


class BlockResidency:
    """Loads the weights of a block before it computes, and releases them afterwards."""

    def __init__(self, blocks_in_flight: int) -> None:
        self._residents = ResidentWeights(blocks_in_flight)
        self._lock = threading.RLock()
        self._open = _Open()
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._blocks_of: dict[StreamedWeight, list[StreamedBlock]] = {}
        #: Context with the saved-tensor hooks that recognize weights; yields whether it has any.
        self.saving: Callable[[], AbstractContextManager[bool]] = without_hooks
        #: Number of accesses to weights outside their blocks.
        self.accesses = 0

    @keeps_grad_mode
    def enter_block(self, block: StreamedBlock, *_: Any) -> None:
        """Load and acquire the weights of a block that is about to compute; a pre-hook."""
        with self._lock, default_modes():
            self._residents.mark_needed(block, backward=_in_backward())
            self._residents.load(block)
            with ExitStack() as acquired:
                for weight in block.weights:
                    weight.acquire()
                    acquired.callback(weight.release)
                acquired.pop_all()
            self._open.blocks.append((block, ExitStack()))
            self._residents.prefetch_next()
        if torch.is_grad_enabled():
            found_again = self._open.blocks[-1][1].enter_context(self.saving())
            if not found_again:
                for weight in block.weights:
                    weight.pin()

    @keeps_grad_mode
    def exit_block(self, block: StreamedBlock, *_: Any) -> None:
        """Release the weights of a block that computed or raised, if it was entered; a hook."""
        open_blocks = self._open.blocks
        places = [place for place, (known, _) in enumerate(open_blocks) if known is block]
        if not places:
            return
        open_blocks.pop(places[-1])[1].close()
        with self._lock, default_modes():
            for weight in block.weights:
                weight.release()
            if not self._residents.order.is_needed_again:
                self._residents.offload(block)

    @contextmanager
    def resident(self, parameters: Iterable[torch.Tensor], *, changes: bool) -> Iterator[None]:
        """Keep the streamed weights among some parameters in memory within the context.

        Args:
            parameters: parameters, streamed or not.
            changes: whether the caller changes their values; version counters do not show it,
                because fused kernels do not increment them.
        """
        weights = [weight for p in parameters if (weight := self._weights.get(p)) is not None]
        if not weights:
            yield
            return
        acquired = ExitStack()
        with self._lock:
            try:
                with default_modes():
                    for weight in weights:
                        for block in self._blocks_of.get(weight, ())[:1]:
                            self._residents.add(block)
                        weight.acquire()
                        acquired.callback(weight.release)
                        if changes:
                            weight.mark_changed()
                yield
            finally:
                with default_modes():
                    acquired.close()
                    self._residents.make_room()

    def prefetch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Prefetch the streamed weights among some parameters."""
        for parameter in parameters if self._weights else ():
            if (weight := self._weights.get(parameter)) is not None:
                weight.prefetch()

    @keeps_grad_mode
    def reset_peak(self) -> None:
        """End a step: nothing that autograd saved is needed any more."""
        self._exit_blocks(self._open.blocks)
        with self._lock, default_modes():
            self._residents.order.step_ended()
            for weight in list(self._weights.values()):
                weight.pinned = False
            self._residents.offload_accessed()
            self._residents.make_room()

    def enter_model(self, blocks: list[StreamedBlock], model: nn.Module, *_: Any) -> None:
        """Exit leftover blocks at a model's outermost call on this thread; a pre-hook.

        torch does not run always_call hooks after Ctrl-C.
        """
        if _calls_under_way(model) == 1:
            self._exit_blocks([entry for entry in self._open.blocks if entry[0] in blocks])

    def _exit_blocks(self, entries: list[tuple[StreamedBlock, ExitStack]]) -> None:
        """Exit blocks of a pass that Ctrl-C interrupted before their forward hooks ran."""
        for block, _ in reversed(list(entries)):
            self.exit_block(block)

    @property
    def has_seen_a_step(self) -> bool:
        """Whether the block order of a whole step is known."""
        return bool(self._residents.order.last_step)

    @contextmanager
    def read(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor, streamed or not, for reading."""
        weight = self._weights.get(tensor)
        if weight is None:
            yield tensor.detach()
            return
        with self._lock, weight.read() as values:
            yield values

    def save(self, tensor: torch.Tensor) -> SavedWeight | None:
        """Return the handle autograd keeps for a streamed weight or a view of one, else None."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        weight = self._residents.weight_in(int(storage._cdata))
        if weight is None or tensor.dtype != weight.form.dtype or not weight.covers(tensor):
            return None  # a view with another dtype or range keeps the storage alive
        with default_modes():
            return SavedWeight(tensor, weight, self._load_for_backward)

    def _load_for_backward(self, weight: StreamedWeight) -> torch.Tensor:
        with self._lock, default_modes():
            for block in self._blocks_of.get(weight, ())[:1]:
                self._residents.mark_needed(block, backward=_in_backward())
                if not weight.is_resident:
                    self._residents.load(block, only=weight)
                self._residents.prefetch_next()
            weight.load()
            return weight.values()

    def _on_access(self, weight: StreamedWeight) -> None:
        self.accesses += 1
        with self._lock:
            self._residents.add_accessed(weight)


class _Open(threading.local):
    """The blocks that are computing on this thread, outermost first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[StreamedBlock, ExitStack]] = []


@contextmanager
def without_hooks() -> Iterator[bool]:
    """The default of `BlockResidency.saving`: no saved-tensor hooks."""
    yield False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _calls_under_way(module: nn.Module) -> int:
    """Count the calls of a module on this thread's stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        count += frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return count


_CALL_CODE = nn.Module._call_impl.__code__
