"""Registry of attached parameters: tells weights from activations, refuses a second owner."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from offload_strategy.errors import ConfigError
from offload_strategy.weights.guarded_parameter import GuardedParameter

_PLAIN = (torch.Tensor, nn.Parameter)

# Shared by all engines of the process, so that no two engines offload the same parameter's states
# or the same module's activations.
_states_owner: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_module_owner: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ParameterRegistry:
    """The modules and parameters that are attached to one engine."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # ------------------------------------------------------------------ owners
    def add_module(self, module: nn.Module) -> None:
        """Claim a module for activation offload.

        Raises ConfigError if it has no parameters, or is attached to an engine already.
        """
        if next(module.parameters(), None) is None:
            raise ConfigError(
                f"attach: {type(module).__name__} has no parameters, so there is nothing to train. "
                f"Attach the model itself, after its layers are created."
            )
        if _owner(_module_owner, module) is not None:
            raise ConfigError(
                f"attach: this {type(module).__name__} is attached already. Attach a model once, "
                f"or close the engine that has it (engine.close()) first."
            )
        _module_owner[module] = weakref.ref(self)
        self._modules.add(module)
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def remove_module(self, module: nn.Module) -> None:
        """Release a module. Idempotent."""
        if _owner(_module_owner, module) is self:
            del _module_owner[module]
        self._modules.discard(module)

    def check_unclaimed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise ConfigError if an attached optimizer has one of these parameters already."""
        for parameter in parameters:
            if _owner(_states_owner, parameter) is not None:
                raise ConfigError(
                    f"attach: the parameter {self.name_of(parameter)!r} is attached with another "
                    f"optimizer already. Attach each parameter once; several optimizers are fine "
                    f"when they share none. Close the other engine first if it is a leftover."
                )

    def claim_states(self, parameters: Iterable[torch.Tensor], owner: object) -> None:
        """Assign parameters to an optimizer for its lifetime."""
        for parameter in parameters:
            _states_owner[parameter] = weakref.ref(owner)

    def release_states(self, parameters: Iterable[torch.Tensor], owner: object) -> None:
        """Release the parameters of an optimizer. Idempotent."""
        for parameter in parameters:
            if _owner(_states_owner, parameter) is owner:
                del _states_owner[parameter]

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return its name in the attached model, or its shape."""
        return str(self._names.get(parameter) or f"of shape {tuple(parameter.shape)}")

    # ------------------------------------------------------------------ weights
    def refresh(self) -> None:
        """Update which storages hold weights; called at the start of each forward pass."""
        storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for module in list(self._modules):
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if type(tensor) is GuardedParameter:
                    continue  # its bytes may be offloaded; the stream recognizes it
                for storage in _storages_of(tensor):
                    storages[int(storage._cdata)] = weakref.ref(storage)
        self._storages = storages

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares its storage with a parameter or buffer.

        A wrapper subclass (such as a quantized weight of integers and scales) is a weight if any of
        its inner tensors is, and so is each inner tensor.
        """
        for storage in _storages_of(tensor):
            reference = self._storages.get(int(storage._cdata))
            # Addresses are reused, so the storage must be the same living object.
            if reference is not None and reference() is storage:
                return True
        return False


def _owner(owners: WeakTensorKeyDictionary | WeakIdKeyDictionary, key: object) -> object | None:
    reference = owners.get(key)
    return None if reference is None else reference()


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor and, for wrapper subclasses, of its inner tensors."""
    try:
        storages = [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):
        storages = []  # sparse tensors and some wrappers have no storage of their own
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):
                storages += _storages_of(inner)
    return storages
