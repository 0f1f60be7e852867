"""An estimate of the memory of a step that is only gone through: no data, no computing.

Every tensor of a copy of the model is a fake one, which has a shape and no bytes. What is alive at
each moment is added up; saved tensors that would leave are dropped, and so are gradients that
updates would use up. `torch.distributed._tools.mem_tracker` finds the same peaks to a few bytes
(where nothing leaves), more slowly.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from offload_strategy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What a step has in memory besides parameters, optimizer states and the inputs."""

    #: Most bytes of activations in use and gradients.
    peak_bytes: int
    #: Bytes that autograd saves and that may leave.
    saved_bytes: int


def estimate_memory(
    model: nn.Module,
    inputs: tuple[Any, ...],
    named_inputs: Mapping[str, Any],
    *,
    min_size: int | None,
    gradients: int | None,
) -> MemoryEstimate:
    """Go through forward and backward of one step of a model, which is not touched.

    Saved tensors of `min_size` bytes leave (None: none does). So many `gradients` are in memory at
    a time, because updates use them up (None: all are). Raises a ConfigError if the model needs
    values to go on, or its output has no loss.
    """
    random = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            twin = _without_bytes(model)
            args, kwargs = tree_map_only(
                torch.Tensor, fake.from_tensor, (inputs, dict(named_inputs))
            )
            weights = {_key(tensor) for tensor in (*twin.parameters(), *twin.buffers())}
            live, saved = _LiveStorages(weights), _SavedTensors(weights, min_size)
            if gradients is not None:
                _drop_gradients(twin, gradients)
            with live, torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
                _loss_of(twin(*args, **kwargs)).backward()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"predict_memory: the model could not be gone through without data "
            f"({type(error).__name__}: {error}). Models whose way depends on values cannot be."
        ) from error
    finally:
        torch.set_rng_state(random)
    return MemoryEstimate(live.peak_bytes, saved.nbytes)


def _without_bytes(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose tensors are made fake by the mode that is active."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        twin: torch.Tensor = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin
    return copy.deepcopy(model, memo)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _LiveStorages(TorchDispatchMode):
    """Adds up the storages that are alive, except for those of weights."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._known = set(weights)
        self._nbytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute, and count what came out."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and _key(value) not in self._known:
                storage = value.untyped_storage()
                self._known.add(_key(value))
                self._nbytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self._nbytes)
                weakref.finalize(storage, self._freed, _key(value), storage.nbytes())
        return result

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._nbytes -= nbytes


class _OffloadedStorage:
    """A storage that has left; while it is back, all of its views share it."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.original = weakref.ref(storage)
        self._nbytes = storage.nbytes()
        self._device = device
        self._loaded: weakref.ref[torch.Tensor] | None = None

    def load(self) -> torch.Tensor:
        """Return its bytes, made anew unless they are back already."""
        flat = None if self._loaded is None else self._loaded()
        if flat is None:
            flat = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            self._loaded = weakref.ref(flat)
        return flat


class _SavedTensors:
    """Drops what would leave, except for weights, and makes it anew when backward asks for it."""

    def __init__(self, weights: set[int], min_size: int | None) -> None:
        self._weights = weights
        self._min_size = min_size
        self._left: dict[int, _OffloadedStorage] = {}
        self.nbytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        storage, key = tensor.untyped_storage(), _key(tensor)
        small = self._min_size is None or storage.nbytes() < self._min_size
        if key in self._weights or small:
            return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor
        left = self._left.get(key)
        if left is None or left.original() is not storage:
            self.nbytes += storage.nbytes()
            left = self._left[key] = _OffloadedStorage(storage, tensor.device)
        view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return left, tensor.dtype, view

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        left, dtype, view = packed
        # Not by `set_`: a fake tensor that is given a storage so keeps it for ever.
        flat = left.load()
        whole: torch.Tensor = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(*view)


def _drop_gradients(model: nn.Module, most: int) -> None:
    """Drop gradients of a model when later ones come, as updates in backward do."""
    kept: deque[torch.Tensor] = deque()

    def ready(parameter: torch.Tensor) -> None:
        kept.append(parameter)
        if len(kept) > most:
            kept.popleft().grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(ready)


def _loss_of(output: Any) -> torch.Tensor:
    """Return what backward begins with."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        tensors = (value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
        found = next((tensor for tensor in tensors if tensor.requires_grad), None)
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ConfigError(
            "predict_memory: the model's output has no tensor with a gradient. Pass inputs with "
            "which it computes a loss."
        )
    return found if found.dim() == 0 else found.sum()
