"""Saved weights of ZeRO-3: autograd keeps their position in the parameter instead of their bytes.

DeepSpeed gathers the weights of a module before its forward and partitions them afterwards, and
does both again around its backward. Saved tensors must not keep the gathered bytes in memory
between the two. Without saved-tensor hooks autograd keeps the parameter itself, but hooks receive a
tensor that shares its storage. This module recognizes the parameter of such a tensor.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from offload_strategy.torch_support.modules import WeakHook

if TYPE_CHECKING:
    from offload_strategy.engine.offload_engine import OffloadEngine


class GatheredWeights:
    """The storages of gathered parameters; its hooks must be registered after DeepSpeed's."""

    def __init__(self, module: nn.Module) -> None:
        # By the address of a storage, which the weights of several parameters may share.
        self._by_storage: dict[int, dict[int, weakref.ref[nn.Parameter]]] = {}
        self._storages: dict[int, int] = {}
        hook = WeakHook(self._note)
        self._handles = [each.register_forward_pre_hook(hook) for each in module.modules()]

    def _note(self, module: nn.Module, _: Any) -> None:
        # Gathered for a module are its own parameters and external ones.
        own = [each for each in module.parameters(recurse=False) if _is_of_zero3(each)]
        for parameter in (*own, *dict(getattr(module, "_external_params", {})).values()):
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
        """Return the handle that autograd keeps for a saved weight, or None for other tensors."""
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        address = int(tensor.untyped_storage()._cdata)
        for reference in self._by_storage.get(address, {}).values():
            if (parameter := reference()) is None:
                continue
            values = parameter.data
            offset = int(tensor.storage_offset() - values.storage_offset())
            # Addresses are reused, so the parameter must still have this storage.
            is_there = int(values.untyped_storage()._cdata) == address
            if is_there and tensor.dtype == values.dtype and _fits(tensor, offset, values.numel()):
                return GatheredWeight(parameter, tensor.shape, tensor.stride(), offset)
        return None

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._by_storage.clear()
        self._storages.clear()


class GatheredWeight(NamedTuple):
    """Position of a saved weight, or a view of one, in its parameter; keeps no values."""

    parameter: Any  # a graph keeps what it needs
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        """Return the tensor on the bytes that DeepSpeed gathers for backward, or else on a copy."""
        parameter = self.parameter
        if parameter.ds_status.name == "AVAILABLE":
            return self._view(parameter.data)
        parameter.all_gather()
        try:
            return self._view(parameter.data).clone()
        finally:
            parameter.partition()

    def _view(self, values: torch.Tensor) -> torch.Tensor:
        return values.as_strided(self.shape, self.strides, values.storage_offset() + self.offset)


def install(engine: OffloadEngine, module: nn.Module) -> GatheredWeights | None:
    """Make an engine recognize saved weights of its module, after `deepspeed.initialize`.

    Returns an object to remove with the engine; None below ZeRO-3, where nothing is partitioned.
    """
    if not any(_is_of_zero3(parameter) for parameter in module.parameters()):
        return None
    weights = GatheredWeights(module)
    engine.save_weights_by(weights.save)
    return weights


def _is_of_zero3(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id") and hasattr(parameter, "ds_status")


def _fits(tensor: torch.Tensor, offset: int, elements: int) -> bool:
    """Whether a tensor that begins at an offset lies within so many elements."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in steps)
    return offset >= 0 and tensor.numel() > 0 and offset + reach <= elements
