"""Streaming: the weights of a block are in memory while it computes, and little longer.

Here is which models are streamed, and how their weights come to be; turns.py has what happens while
they train.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket
from offload_strategy.store.tiers import Tier
from offload_strategy.torch_support.weak_callbacks import weakly
from offload_strategy.weights.block_hooks import Attached, BlockHooks, ModelHook
from offload_strategy.weights.block_order import StreamedBlock
from offload_strategy.weights.block_residency import WeightTurns, without_hooks
from offload_strategy.weights.model_building import (
    fill_module,
    modules_to_fill,
    watched_registration,
)
from offload_strategy.weights.streamed_weight import StreamedWeight
from offload_strategy.weights.weight_blocks import can_leave, cut_into_blocks


class WeightStream(WeightTurns):
    """The streamed weights of one engine.

    Args:
        store: takes the bytes.
        tiers: where they may go, in order.
        blocks_in_flight: in memory at a time, or on their way there.
        classes: names of module classes of which each instance is a block; see `cut_into_blocks`.
        is_block: likewise.
        min_bytes: smaller parameters stay in memory.
    """

    def __init__(
        self,
        store: TensorStore,
        tiers: Sequence[Tier],
        *,
        blocks_in_flight: int,
        min_bytes: int,
        classes: Sequence[str] = (),
        is_block: Callable[[str, nn.Module], bool] | None = None,
    ) -> None:
        super().__init__(blocks_in_flight)
        self._store = store
        self._tiers = list(tiers)
        self._min_bytes = min_bytes
        self._classes = list(classes)
        self._is_block = is_block
        self._models: list[Attached] = []

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
                self._store,
                self._tiers,
                weakly(self._touched),
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


def _saving(
    stream: weakref.ref[WeightStream],
) -> Callable[[], AbstractContextManager[bool]]:
    def saving() -> AbstractContextManager[bool]:
        alive = stream()
        return without_hooks() if alive is None else alive.saving()

    return saving
