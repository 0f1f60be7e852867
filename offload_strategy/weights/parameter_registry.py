"""Registry of attached parameters: tells weights from activations, refuses a second owner."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_strategy.errors import ConfigError
from offload_strategy.weights.guarded_parameter import GuardedParameter

_PLAIN = (torch.Tensor, nn.Parameter)
_LAZY = (UninitializedBuffer, UninitializedParameter)

# Those of all engines of the process, so that no two offload the same module's activations.
_registries: weakref.WeakSet[ParameterRegistry] = weakref.WeakSet()

_Found = TypeVar("_Found")


class ParameterRegistry:
    """The modules and parameters that are attached to one engine."""

    def __init__(self) -> None:
        _registries.add(self)
        #: The attached modules.
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: Those of lazy modules that had no storage yet at the last refresh.
        self._lazy: list[weakref.ref[torch.Tensor]] = []

    # ------------------------------------------------------------------ owners
    def add_module(self, module: nn.Module) -> None:
        """Claim a module for activation offload."""
        if next(module.parameters(), None) is None:
            raise ConfigError(
                f"attach: {type(module).__name__} has no parameters, so there is nothing to train. "
                f"Attach the model itself, after its layers are created."
            )
        if after_collection(lambda: any(module in each.modules for each in _registries)):
            raise ConfigError(
                f"attach: this {type(module).__name__} is attached already. Attach a model once, "
                f"or close the engine that has it (engine.close()) first."
            )
        self.modules.add(module)

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return its name in the attached model, or its shape."""
        every = (named for module in list(self.modules) for named in module.named_parameters())
        names = (name for name, each in every if each is parameter)
        return next(names, f"of shape {tuple(parameter.shape)}")

    # ------------------------------------------------------------------ weights
    def refresh(self) -> None:
        """Update which storages hold weights; called at the start of each forward pass."""
        storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._lazy.clear()
        for module in list(self.modules):
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if type(tensor) is GuardedParameter:
                    continue  # its bytes may be offloaded; the stream recognizes it
                if isinstance(tensor, _LAZY):
                    self._lazy.append(weakref.ref(tensor))
                    continue
                for storage in _storages_of(tensor):
                    storages[storage._cdata] = weakref.ref(storage)
        self._storages = storages

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares its storage with a parameter or buffer.

        A wrapper subclass (such as a quantized weight of integers and scales) is a weight if any of
        its inner tensors is, and so is each inner tensor.
        """
        if self._lazy and not all(isinstance(lazy(), _LAZY) for lazy in self._lazy):
            self.refresh()  # a lazy module has materialized its weights in this pass
        for storage in _storages_of(tensor):
            reference = self._storages.get(storage._cdata)
            # Addresses are reused, so the storage must be the same living object.
            if reference is not None and reference() is storage:
                return True
        return False


def after_collection(find: Callable[[], _Found]) -> _Found:
    """Return what is found; if only reference cycles kept it, they are collected, and it is not."""
    if find():
        gc.collect()
    return find()


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor and, for wrapper subclasses, of its inner tensors."""
    # Sparse tensors and some wrappers have no storage of their own.
    storages = [tensor.untyped_storage()] if torch._C._has_storage(tensor) else []
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):
                storages += _storages_of(inner)
    return storages
