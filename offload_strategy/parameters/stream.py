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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from offload_strategy.heap import Heap, Tier
from offload_strategy.parameters.blocks import can_leave, cut_into_blocks
from offload_strategy.parameters.building import (
    initialise,
    modules_to_fill,
    watched_registration,
)
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
    ) -> None:
        self._heap = heap
        self._tiers = list(tiers)
        self._residents = Residents(blocks_in_flight)
        self._min_bytes = min_bytes
        self._classes = list(classes)
        self._lock = threading.RLock()
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._models: dict[int, _Attached] = {}
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

    def bytes_to_come(self, model: nn.Module) -> int:
        """Bytes of a model's weights that have no place on the tiers yet."""
        return sum(
            parameter.nbytes
            for parameter in model.parameters()
            if parameter not in self._weights and can_leave(parameter, self._min_bytes)
        )

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Make the parameters of a model that are on the meta device, module by module.

        Raises:
            ConfigError: a module cannot initialise itself.
        """
        for module in modules_to_fill(model):
            missing = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
            for name, parameter in missing.items():
                made = nn.Parameter(
                    torch.empty_like(parameter, device=device), parameter.requires_grad
                )
                torch.utils.swap_tensors(parameter, made)  # optimizers have it already
                if can_leave(parameter, self._min_bytes):
                    with self._lock:
                        self._residents.stray(self._stream(name, parameter))
            if missing:  # else all of them are tied to what another module has filled
                initialise(module)
            with self._lock:
                self._residents.send_strays()

    def _stream(self, name: str, parameter: nn.Parameter) -> StreamedWeight:
        """The weight of a parameter, made when it is new."""
        weight: StreamedWeight | None = self._weights.get(parameter)
        if weight is None:
            touched = _weakly(self._touched)
            weight = StreamedWeight(name, parameter, self._heap, self._tiers, touched)
            self._weights[parameter] = weight
        weight.name = name
        return weight

    def attach(self, model: nn.Module) -> None:
        """Send a model's weights out, and bring them whenever a block computes."""
        attached = _Attached(weakref.ref(model, _weakly(self._forget)))
        self._models[id(model)] = attached
        try:
            self._send_out(model, attached)
        except BaseException:
            self.detach(model)
            raise

    def _send_out(self, model: nn.Module, attached: _Attached) -> None:
        for plan in cut_into_blocks(model, self._classes, min_bytes=self._min_bytes):
            weights = [self._stream(name, p) for name, p in plan.parameters.items()]
            block = StreamedBlock(plan.name, weights)
            attached.blocks.append(block)
            for weight in weights:
                self._homes.setdefault(weight, []).append(block)
            with self._lock:
                self._residents.add(block)
                self._residents.make_room()
            hooks = _BlockHooks(self, block)
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
        attached = self._models.pop(id(model), None)
        if attached is not None:
            self._leave(attached, restore=restore)

    def _forget(self, model: weakref.ref[nn.Module]) -> None:
        """A model died."""
        for key in [key for key, known in self._models.items() if known.model is model]:
            self._leave(self._models.pop(key), restore=False)

    def _leave(self, attached: _Attached, *, restore: bool) -> None:
        with self._lock:
            for handle in attached.handles:
                handle.remove()
            for block in attached.blocks:
                self._residents.forget_block(block)
                for weight in block.weights:
                    if self._homes.pop(weight, None) is not None:
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
        for attached in list(self._models.values()):
            self._leave(attached, restore=restore)
        self._models.clear()
        for weight in list(self._weights.values()):  # built, and never attached
            self._close(weight, restore=restore)

    # ------------------------------------------------------------------ turns
    def begin(self, block: StreamedBlock) -> None:
        """A block computes: its weights must be here."""
        with self._lock:
            self._residents.needed(block, backward=_in_backward())
            self._residents.bring(block)
            for weight in block.weights:
                weight.begin_turn()
            self._residents.fetch_ahead()

    def end(self, block: StreamedBlock) -> None:
        """A block has computed."""
        with self._lock:
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
                for weight in weights:
                    for block in self._homes.get(weight, ())[:1]:
                        self._residents.add(block)
                    weight.begin_turn()
                    begun.append(weight)
                    if changes:
                        weight.note_change()
                yield
            finally:
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
        with self._lock:
            for weight in list(self._weights.values()):
                weight.bound = False
            self._residents.send_strays()
            self._residents.make_room()

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
        if weight is None or tensor.dtype != weight.form.dtype:
            return None  # another view of the bytes: while that lives they stay
        return SavedWeight(tensor, weight, self._needed)

    def _needed(self, weight: StreamedWeight) -> torch.Tensor:
        with self._lock:
            block = self._homes[weight][0]
            self._residents.needed(block, backward=_in_backward())
            if not weight.here:
                self._residents.bring(block, only=weight)
            self._residents.fetch_ahead()
            return weight.values()

    def _touched(self, weight: StreamedWeight) -> None:
        self.touches += 1
        with self._lock:
            self._residents.stray(weight)


@dataclass(eq=False)
class _Attached:
    """A model, and what was done to it."""

    model: weakref.ref[nn.Module]
    blocks: list[StreamedBlock] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)


class _BlockHooks:
    """Forward hooks of one block. A copy of them does nothing: it belongs to one engine."""

    def __init__(
        self, stream: WeightStream | None = None, block: StreamedBlock | None = None
    ) -> None:
        self._stream = None if stream is None else weakref.ref(stream)
        self._block = block
        self._begun = 0

    def before(self, module: nn.Module, args: Any) -> None:
        """The block is about to compute."""
        stream = None if self._stream is None else self._stream()
        if stream is not None and self._block is not None:
            stream.begin(self._block)
            self._begun += 1

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """The block has computed, or raised; also when it never began."""
        stream = None if self._stream is None else self._stream()
        if stream is not None and self._block is not None and self._begun:
            self._begun -= 1
            stream.end(self._block)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _weakly(method: Any) -> Any:
    """Call a bound method, of one argument, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(argument: Any) -> None:
        if (alive := reference()) is not None:
            alive(argument)

    return call
