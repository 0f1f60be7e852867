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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.heap import Heap, Ticket, Tier
from offload_strategy.parameters.blocks import can_leave, cut_into_blocks
from offload_strategy.parameters.building import fill_module, modules_to_fill, watched_registration
from offload_strategy.parameters.context import undisturbed
from offload_strategy.parameters.hooks import Attached, BlockHooks, ModelHook
from offload_strategy.parameters.order import StreamedBlock
from offload_strategy.parameters.residents import Residents
from offload_strategy.parameters.saved import SavedWeight
from offload_strategy.parameters.weights import StreamedWeight


class WeightStream:
    """The streamed weights of one engine.

    Args:
        heap: takes the bytes.
        tiers: where they may go, in order.
        blocks_in_flight: in memory at a time, or on their way there.
        classes: names of module classes of which each instance is a block; see `cut_into_blocks`.
        is_block: likewise.
        min_bytes: smaller parameters stay in memory.
    """

    def __init__(
        self,
        heap: Heap,
        tiers: Sequence[Tier],
        *,
        blocks_in_flight: int,
        min_bytes: int,
        classes: Sequence[str] = (),
        is_block: Callable[[str, nn.Module], bool] | None = None,
    ) -> None:
        self._heap = heap
        self._tiers = list(tiers)
        self._residents = Residents(blocks_in_flight)
        self._min_bytes = min_bytes
        self._classes = list(classes)
        self._is_block = is_block
        self._lock = threading.RLock()
        self._open = _Open()
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._models: list[Attached] = []
        #: Puts hooks in force with which autograd finds weights; says whether there are some.
        self.saving: Callable[[], AbstractContextManager[bool]] = _without_hooks
        self._homes: dict[StreamedWeight, list[StreamedBlock]] = {}
        #: Weights that were touched out of turn.
        self.touches = 0

    # ------------------------------------------------------------------ models
    @contextmanager
    def building(self) -> Iterator[None]:
        """Let weights leave while models are made inside; see building.py."""

        def register(name: str, parameter: nn.Parameter) -> None:
            with self._lock:
                self._residents.stray(self._stream(name, parameter))

        try:
            with watched_registration(register, self._min_bytes):
                yield
        finally:
            with self._lock:
                self._residents.send_strays()

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is streamed, or would be if its model were attached."""
        return parameter in self._weights or can_leave(parameter, self._min_bytes)

    def bytes_to_come(self, model: nn.Module) -> int:
        """Bytes of a model's weights that will need room on the tiers, beside what has some."""
        # An adopted weight moves to the tiers when it is updated.
        return self.bytes_to_be_placed(
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad or parameter not in self._weights
        )

    def bytes_to_be_placed(self, parameters: Iterable[torch.Tensor]) -> int:
        """Bytes of the parameters that are streamed and have no place on the tiers."""
        return sum(
            parameter.nbytes
            for parameter in parameters
            if self.takes(parameter)
            and ((weight := self._weights.get(parameter)) is None or not weight.is_placed)
        )

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Make the parameters of a model that are on the meta device, module by module.

        Raises:
            ConfigError: a module cannot initialise itself.
        """
        for name, module in modules_to_fill(model):
            fill_module(name, module, device, self.let_go)
            with self._lock:
                self._residents.send_strays()

    def let_go(self, name: str, parameter: nn.Parameter) -> None:
        """Stream a parameter that is in memory; it leaves when others need the room."""
        if can_leave(parameter, self._min_bytes):
            with self._lock:
                self._residents.stray(self._stream(name, parameter))

    def receive(self, name: str, parameter: nn.Parameter, ticket: Ticket) -> None:
        """Give a parameter the values that a ticket has, without bringing them."""
        with self._lock:
            self._stream(name, parameter).receive(ticket)

    def _stream(self, name: str, parameter: nn.Parameter) -> StreamedWeight:
        """The weight of a parameter, made when it is new."""
        weight: StreamedWeight | None = self._weights.get(parameter)
        if weight is None:
            weight = StreamedWeight(
                name,
                parameter,
                self._heap,
                self._tiers,
                _weakly(self._touched),
                _saving(weakref.ref(self)),
                self._lock,
            )
            self._weights[parameter] = weight
        weight.name = name
        return weight

    def attach(self, model: nn.Module) -> None:
        """Send a model's weights out, and bring them whenever a block computes."""
        self._prune()
        attached = Attached(weakref.ref(model))
        self._models.append(attached)
        try:
            self._send_out(model, attached)
        except BaseException:
            self.detach(model)
            raise

    def _send_out(self, model: nn.Module, attached: Attached) -> None:
        hook = ModelHook(self, attached)
        attached.handles.append(model.register_forward_pre_hook(hook, prepend=True))
        for plan in cut_into_blocks(model, self._classes, self._is_block, self._min_bytes):
            weights = [self._stream(name, p) for name, p in plan.parameters.items()]
            block = StreamedBlock(plan.name, weights)
            attached.blocks.append(block)
            for weight in weights:
                self._homes.setdefault(weight, []).append(block)
            with self._lock:
                self._residents.add(block)
                self._residents.make_room()
            hooks = BlockHooks(self, block)
            module = plan.module
            attached.handles += [
                module.register_forward_pre_hook(hooks.before, prepend=True),
                module.register_forward_hook(hooks.after, always_call=True),
            ]
        with self._lock:
            self._residents.make_room(0)
            self._residents.send_strays()

    def detach(self, model: nn.Module, *, restore: bool = True) -> None:
        """Leave a model alone.

        Args:
            model: that was attached.
            restore: bring its weights back, which must fit into memory then. Else it has NaN from
                now on.
        """
        for attached in [known for known in self._models if known.model() is model]:
            self._models.remove(attached)
            self._leave(attached, restore=restore)

    def _prune(self) -> None:
        """Forget models of which no weight is alive; parts of one may outlive it."""
        with self._lock:
            for attached in list(self._models):
                weights = [weight for block in attached.blocks for weight in block.weights]
                if attached.model() is None and all(w.parameter is None for w in weights):
                    self._models.remove(attached)
                    self._leave(attached, restore=False)

    def _leave(self, attached: Attached, *, restore: bool) -> None:
        with self._lock:
            for handle in attached.handles:
                handle.remove()
            for block in attached.blocks:
                self._residents.forget_block(block)
                for weight in block.weights:
                    homes = self._homes.get(weight, [])
                    if block in homes:
                        homes.remove(block)
                        if not homes:  # else a part of another model as well
                            del self._homes[weight]
                            self._close(weight, restore=restore)

    def _close(self, weight: StreamedWeight, *, restore: bool) -> None:
        self._residents.forget_weight(weight)
        parameter = weight.parameter
        if parameter is not None:
            self._weights.pop(parameter, None)
        weight.close(restore=restore)

    def nbytes_away(self) -> int:
        """Bytes of all weights that are not in memory."""
        return sum(weight.nbytes for weight in self._weights.values() if not weight.here)

    def close(self, *, restore: bool) -> None:
        """Leave every parameter alone; see `detach`."""
        for attached in self._models:
            self._leave(attached, restore=restore)
        self._models.clear()
        for weight in list(self._weights.values()):  # built, and never attached
            self._close(weight, restore=restore)

    # ------------------------------------------------------------------ turns
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

    def turns(self) -> list[tuple[StreamedBlock, bool]]:
        """Which blocks a step needs, in order, and whether for backward.

        As in the last step; before there was one, as they are registered, and back again.
        """
        with self._lock:
            learned = self._residents.order.last_step
        if learned:
            backward = {block for block, in_backward in learned if in_backward}
            # Of a first layer no weight is needed in backward, where its input has no gradient.
            rest = {block: None for block, _ in learned if block not in backward and block.trained}
            return [*learned, *((block, True) for block in rest)]
        blocks = [block for attached in self._models for block in attached.blocks]
        return [(block, False) for block in blocks] + [(block, True) for block in reversed(blocks)]

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


def _saving(
    stream: weakref.ref[WeightStream],
) -> Callable[[], AbstractContextManager[bool]]:
    def saving() -> AbstractContextManager[bool]:
        alive = stream()
        return _without_hooks() if alive is None else alive.saving()

    return saving


@contextmanager
def _without_hooks() -> Iterator[bool]:
    yield False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _weakly(method: Any) -> Any:
    """Call a bound method, of one argument, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (alive := reference()) is not None:
            alive(argument)

    return call
