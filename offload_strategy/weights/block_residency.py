"""Turns: who needs which weights now, and what autograd keeps of them.

[Note: who has its turn]
A block's turn is its forward (again inside backward, where it is recomputed) and every update of
its weights. What autograd saves of a weight is where it lies in it, so backward finds the bytes
wherever they are by then. Between turns the weights stay while no other block needs the room: of
the blocks in memory the one that is expected last goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.torch_support.grad_mode import keeps_grad_mode
from offload_strategy.weights.block_hooks import Attached
from offload_strategy.weights.block_order import StreamedBlock
from offload_strategy.weights.neutral_context import undisturbed
from offload_strategy.weights.resident_weights import Residents
from offload_strategy.weights.saved_weight import SavedWeight
from offload_strategy.weights.streamed_weight import StreamedWeight


class WeightTurns:
    """Brings weights when their turn comes, and lets them go after it.

    Args:
        blocks_in_flight: in memory at a time, or on their way there.
    """

    def __init__(self, blocks_in_flight: int) -> None:
        self._residents = Residents(blocks_in_flight)
        self._lock = threading.RLock()
        self._open = _Open()
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._homes: dict[StreamedWeight, list[StreamedBlock]] = {}
        #: Puts hooks in force with which autograd finds weights; says whether there are some.
        self.saving: Callable[[], AbstractContextManager[bool]] = without_hooks
        #: Weights that were touched out of turn.
        self.touches = 0

    @keeps_grad_mode
    def begin(self, block: StreamedBlock) -> None:
        """A block computes: its weights must be here."""
        with self._lock, undisturbed():
            self._residents.needed(block, backward=_in_backward())
            self._residents.bring(block)
            begun = []
            try:
                for weight in block.weights:
                    weight.begin_turn()
                    begun.append(weight)
            except BaseException:
                for weight in begun:
                    weight.end_turn()
                raise
            self._open.blocks.append((block, ExitStack()))
            self._residents.fetch_ahead()
        if torch.is_grad_enabled():
            found_again = self._open.blocks[-1][1].enter_context(self.saving())
            if not found_again:
                for weight in block.weights:
                    weight.bind()

    @keeps_grad_mode
    def end(self, block: StreamedBlock) -> None:
        """A block has computed, or raised; also when it never began."""
        open_blocks = self._open.blocks
        places = [place for place, (known, _) in enumerate(open_blocks) if known is block]
        if not places:
            return
        open_blocks.pop(places[-1])[1].close()
        with self._lock, undisturbed():
            for weight in block.weights:
                weight.end_turn()
            if not self._residents.order.needed_again:
                self._residents.send(block)

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
                with undisturbed():
                    for weight in weights:
                        for block in self._homes.get(weight, ())[:1]:
                            self._residents.add(block)
                        weight.begin_turn()
                        begun.append(weight)
                        if changes:
                            weight.note_change()
                yield
            finally:
                with undisturbed():
                    for weight in begun:
                        weight.end_turn()
                    self._residents.make_room()

    def ahead(self, parameters: Iterable[torch.Tensor]) -> None:
        """The weights among some parameters will be held soon."""
        if self._weights:
            for parameter in parameters:
                weight = self._weights.get(parameter)
                if weight is not None:
                    weight.fetch()

    @keeps_grad_mode
    def start_over(self) -> None:
        """A step has ended, or a new pass begins: autograd saved nothing that is still needed."""
        self._break_off(self._open.blocks)
        with self._lock, undisturbed():
            self._residents.order.step_ended()
            for weight in list(self._weights.values()):
                weight.bound = False
            self._residents.send_strays()
            self._residents.make_room()

    def begin_model(self, attached: Attached) -> None:
        """A model is called, and no other call of it is under way on this thread."""
        self._break_off([entry for entry in self._open.blocks if entry[0] in attached.blocks])

    def _break_off(self, entries: list[tuple[StreamedBlock, ExitStack]]) -> None:
        """End turns of a pass that Ctrl-C broke off: no hook came after it."""
        for block, _ in reversed(list(entries)):
            self.end(block)

    @property
    def has_seen_a_step(self) -> bool:
        """Whether the order of a step is known."""
        return bool(self._residents.order.last_step)

    @contextmanager
    def read(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The values of any tensor, streamed or not, to be read within."""
        weight = self._weights.get(tensor)
        if weight is None:
            yield tensor.detach()
            return
        with self._lock, weight.read() as values:
            yield values

    # ------------------------------------------------------------------ autograd
    def save(self, tensor: torch.Tensor) -> SavedWeight | None:
        """What stands for a saved tensor, if it is a streamed weight or a view of one."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        weight = self._residents.whose(int(storage._cdata))
        if weight is None or tensor.dtype != weight.form.dtype or not weight.covers(tensor):
            return None  # another view of the bytes: while that lives they stay
        with undisturbed():
            return SavedWeight(tensor, weight, self._needed)

    def _needed(self, weight: StreamedWeight) -> torch.Tensor:
        with self._lock, undisturbed():
            for block in self._homes.get(weight, ())[:1]:
                self._residents.needed(block, backward=_in_backward())
                if not weight.here:
                    self._residents.bring(block, only=weight)
                self._residents.fetch_ahead()
            weight.bring()
            return weight.values()

    def _touched(self, weight: StreamedWeight) -> None:
        self.touches += 1
        with self._lock:
            self._residents.stray(weight)


class _Open(threading.local):
    """The blocks that compute on a thread, outer ones first."""

    def __init__(self) -> None:
        self.blocks: list[tuple[StreamedBlock, ExitStack]] = []


@contextmanager
def without_hooks() -> Iterator[bool]:
    """What `WeightTurns.saving` is where nothing else offers hooks."""
    yield False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
