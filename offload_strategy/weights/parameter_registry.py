"""The registry of parameters: tells weights from activations, and refuses a second owner."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from offload_strategy.errors import ConfigError
from offload_strategy.weights.guarded_parameter import GuardedParameter

_PLAIN = (torch.Tensor, nn.Parameter)

# Across all engines of the process: two engines that swap the same parameter's state, or offload
# the same module's activations, would each believe that the other's bytes are theirs.
_swapped_by: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_offloaded_by: WeakIdKeyDictionary = WeakIdKeyDictionary()


class ParameterRegistry:
    """What one engine knows of the models and parameters that were attached to it."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # ------------------------------------------------------------------ owners
    def add_module(self, module: nn.Module) -> None:
        """Claim a module for activation offload.

        Raises:
            ConfigError: it has no parameters, or an engine has it already.
        """
        if next(module.parameters(), None) is None:
            raise ConfigError(
                f"attach: {type(module).__name__} has no parameters, so there is nothing to train. "
                f"Attach the model itself (and after its layers are made)."
            )
        if _owner(_offloaded_by, module) is not None:
            raise ConfigError(
                f"attach: this {type(module).__name__} is attached already. Attach a model once, "
                f"or close the engine that has it (engine.close()) first."
            )
        _offloaded_by[module] = weakref.ref(self)
        self._modules.add(module)
        for name, parameter in module.named_parameters():
            self._names[parameter] = name

    def remove_module(self, module: nn.Module) -> None:
        """Give a module up. Idempotent."""
        if _owner(_offloaded_by, module) is self:
            del _offloaded_by[module]
        self._modules.discard(module)

    def check_unclaimed(self, parameters: Iterable[torch.Tensor]) -> None:
        """See to it that no optimizer swaps the states of these parameters already.

        Raises:
            ConfigError: one of them has an owner.
        """
        for parameter in parameters:
            if _owner(_swapped_by, parameter) is not None:
                raise ConfigError(
                    f"attach: the parameter {self.name_of(parameter)!r} is swapped by another "
                    f"optimizer already. Attach each parameter once; several optimizers are fine "
                    f"when they share none. Close the other engine first if it is a leftover."
                )

    def claim_states(self, parameters: Iterable[torch.Tensor], owner: object) -> None:
        """Give parameters to an optimizer, for as long as it lives."""
        for parameter in parameters:
            _swapped_by[parameter] = weakref.ref(owner)

    def release_states(self, parameters: Iterable[torch.Tensor], owner: object) -> None:
        """Take parameters from an optimizer again. Idempotent."""
        for parameter in parameters:
            if _owner(_swapped_by, parameter) is owner:
                del _swapped_by[parameter]

    def name_of(self, parameter: torch.Tensor) -> str:
        """Its name in the attached model, or its shape."""
        return str(self._names.get(parameter) or f"of shape {tuple(parameter.shape)}")

    # ------------------------------------------------------------------ weights
    def refresh(self) -> None:
        """Read anew which storages hold weights; called at the start of each forward pass."""
        storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for module in list(self._modules):
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if type(tensor) is GuardedParameter:
                    continue  # its bytes may be elsewhere; the stream knows what is saved of it
                for part in (tensor,) if type(tensor) in _PLAIN else _parts(tensor):
                    storage = _storage(part)
                    if storage is not None:
                        storages[int(storage._cdata)] = weakref.ref(storage)
        self._storages = storages

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares its storage with a parameter or buffer: itself, a view, a tie.

        A tensor that consists of others (a quantized weight, of integers and scales) is one if any
        of them is; and so is each of them.
        """
        if type(tensor) in _PLAIN:
            return self._is_stored(tensor)
        return any(self._is_stored(part) for part in _parts(tensor))

    def _is_stored(self, tensor: torch.Tensor) -> bool:
        storage = _storage(tensor)
        reference = None if storage is None else self._storages.get(int(storage._cdata))
        # Addresses are used again: one counts only while the storage that had it lives.
        return reference is not None and reference() is storage


def _owner(owners: WeakTensorKeyDictionary | WeakIdKeyDictionary, key: object) -> object | None:
    reference = owners.get(key)
    return None if reference is None else reference()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, and what it consists of if it is a wrapper around others, however deep."""
    yield tensor
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _parts(inner)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # sparse tensors and some wrappers have no storage of their own
