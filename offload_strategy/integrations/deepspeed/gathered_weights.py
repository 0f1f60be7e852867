"""Weights of ZeRO-3 that autograd saves: found again in the parameter, instead of kept or moved.

DeepSpeed gathers the weights of a module before its forward and takes them apart after it, and does
both again around its backward. So what autograd saves of a weight must not hold the bytes of
forward: they would stay in memory from forward to backward, which is what ZeRO-3 is against.
Without saved-tensor hooks autograd holds the parameter itself; saved-tensor hooks are given a
tensor on the same bytes. Here it is found out which parameter's they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from offload_strategy.engine.offload_engine import OffloadEngine

__all__ = ["GatheredWeights"]


class GatheredWeights:
    """Knows, while modules compute, which bytes are those of which gathered parameter.

    Its hooks come after DeepSpeed's, which gather: make it when `deepspeed.initialize` is through.

    Args:
        module: Whose parameters DeepSpeed takes apart.
    """

    def __init__(self, module: nn.Module) -> None:
        # By the address of a storage, which the weights of several parameters may share.
        self._by_storage: dict[int, dict[int, weakref.ref[nn.Parameter]]] = {}
        self._storages: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        me = weakref.ref(self)

        def note(submodule: nn.Module, _: Any) -> None:
            weights = me()
            if weights is not None:
                weights._note(submodule)

        for submodule in module.modules():
            self._handles.append(submodule.register_forward_pre_hook(note))

    def _note(self, module: nn.Module) -> None:
        for parameter in _parameters_of(module):
            name, storage = id(parameter), int(parameter.untyped_storage()._cdata)
            earlier = self._storages.get(name)
            if earlier == storage:
                continue
            if earlier is not None and (those := self._by_storage.get(earlier)) is not None:
                those.pop(name, None)
                if not those:
                    del self._by_storage[earlier]
            self._storages[name] = storage
            self._by_storage.setdefault(storage, {})[name] = weakref.ref(parameter)

    def save(self, tensor: torch.Tensor) -> GatheredWeight | None:
        """What autograd shall hold in place of a tensor; None of one that is no weight."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        address = int(tensor.untyped_storage()._cdata)
        for reference in self._by_storage.get(address, {}).values():
            parameter = reference()
            if parameter is None:
                continue
            values = parameter.data
            # Addresses are used again: one counts only while the parameter lies there.
            is_there = int(values.untyped_storage()._cdata) == address
            if is_there and tensor.dtype == values.dtype and _lies_within(tensor, values):
                return GatheredWeight(tensor, parameter)
        return None

    def close(self) -> None:
        """Take the hooks off. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._by_storage.clear()
        self._storages.clear()


class GatheredWeight:
    """A saved weight, or a view of one: where it lies in its parameter.

    Args:
        tensor: What autograd saves; it is not held.
        parameter: Whose bytes it has.
    """

    __slots__ = ("_offset", "_parameter", "_shape", "_strides")

    def __init__(self, tensor: torch.Tensor, parameter: nn.Parameter) -> None:
        self._parameter = parameter  # a graph keeps what it needs
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - parameter.data.storage_offset()

    def unpack(self) -> torch.Tensor:
        """The tensor, on the bytes that are gathered now.

        DeepSpeed has gathered them before the module's backward. What is needed outside of that is
        gathered for as long as it takes to copy it.
        """
        parameter: Any = self._parameter
        if _is_gathered(parameter):
            return self._view(parameter.data)
        parameter.all_gather()
        try:
            return self._view(parameter.data).clone()
        finally:
            parameter.partition()

    def _view(self, values: torch.Tensor) -> torch.Tensor:
        offset = values.storage_offset() + self._offset
        return values.as_strided(self._shape, self._strides, offset)


def install(engine: OffloadEngine, module: nn.Module) -> GatheredWeights | None:
    """Have an engine find the weights of a module again that DeepSpeed takes apart.

    Args:
        engine: The module's.
        module: As `deepspeed.initialize` left it.

    Returns:
        What is to be closed with the engine; None if nothing is taken apart (below ZeRO-3).
    """
    if not any(_is_of_zero3(parameter) for parameter in module.parameters()):
        return None
    weights = GatheredWeights(module)
    engine.save_weights_by(weights.save)
    return weights


def _is_of_zero3(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and hasattr(parameter, "ds_status")


def _is_gathered(parameter: Any) -> bool:
    return bool(parameter.ds_status.name == "AVAILABLE")


def _parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that are gathered for a module: its own, and those that it borrows."""
    own = module.parameters(recurse=False)
    yield from (parameter for parameter in own if _is_of_zero3(parameter))
    yield from dict(getattr(module, "_external_params", {})).values()


def _lies_within(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    start = tensor.storage_offset() - values.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps)
    return start >= 0 and tensor.numel() > 0 and start + reach <= values.numel()
