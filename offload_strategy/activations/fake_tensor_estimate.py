"""A step that is only gone through, to see how much memory it will take: no data, no computing.

Every tensor of a copy of the model is a fake one, that has a shape and no bytes. What is alive at
each moment is added up; saved tensors that would leave are dropped, gradients that updates would
use up are.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from offload_strategy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a step has in memory beside parameters, optimizer states and the inputs.

    Args:
        peak_bytes: at most: activations in use, and gradients.
        saved_bytes: what autograd saves and may leave.
    """

    peak_bytes: int
    saved_bytes: int


def estimate_memory(
    model: nn.Module,
    inputs: tuple[Any, ...],
    named_inputs: Mapping[str, Any],
    *,
    min_size: int | None,
    gradients: int | None,
) -> Rehearsal:
    """Go through forward and backward of one step.

    Args:
        model: on any device, also such whose weights are away; it is not touched.
        inputs: of its forward, with the shapes and dtypes of a step's.
        named_inputs: likewise.
        min_size: bytes from which a saved tensor leaves; None if none does.
        gradients: how many are in memory at a time, because updates use them up; None if all are.

    Raises:
        ConfigError: the model needs values to go on, or its output has no loss.
    """
    random = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            twin = _without_bytes(model)
            args, kwargs = tree_map(
                lambda value: fake.from_tensor(value) if isinstance(value, torch.Tensor) else value,
                (inputs, dict(named_inputs)),
            )
            weights = {_key(tensor) for tensor in _tensors_of(twin)}
            live, saved = _Live(weights), _Saved(weights, min_size)
            with live, _gradients_kept(twin.parameters(), gradients), saved.hooks():
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
    return Rehearsal(live.peak_bytes, saved.nbytes)


def _without_bytes(model: nn.Module) -> nn.Module:
    """A copy of a model with fake tensors; to be called where tensors are made fake."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        twin: torch.Tensor = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, tensor.requires_grad)
        memo[id(tensor)] = twin
    return copy.deepcopy(model, memo)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Live(TorchDispatchMode):
    """Adds up the storages that are alive.

    Args:
        weights: storages that are not counted.
    """

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
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._nbytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._nbytes)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._nbytes -= nbytes


class _Saved:
    """Drops what would leave, and makes it anew when it is asked for.

    Args:
        weights: storages that stay.
        min_size: bytes from which a tensor leaves; None if none does.
    """

    def __init__(self, weights: set[int], min_size: int | None) -> None:
        self._weights = set(weights)
        self._min_size = min_size
        self._left: dict[int, tuple[weakref.ref[Any], _Left]] = {}
        self.nbytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """To be in force while forward runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        storage = tensor.untyped_storage()
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key in self._weights or self._min_size is None or nbytes < self._min_size:
            return tensor.detach() if tensor.requires_grad and tensor.is_leaf else tensor
        known = self._left.get(key)
        if known is None or known[0]() is not storage:
            self.nbytes += nbytes
            left = _Left(nbytes, tensor.device)
            self._left[key] = (weakref.ref(storage), left)
        else:
            left = known[1]
        return _View(
            left, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )


class _Left:
    """A storage that has left; while it is back, all of its views share it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._back: weakref.ref[torch.Tensor] | None = None

    def come_back(self) -> torch.Tensor:
        """Its bytes, made anew unless they are back already."""
        flat = None if self._back is None else self._back()
        if flat is None:
            flat = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            self._back = weakref.ref(flat)
        return flat


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor whose storage has left."""

    left: _Left
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        """It, on the storage that has come back."""
        # Not by `set_`: a fake tensor that is given a storage so keeps it for ever.
        flat = self.left.come_back()
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.strides, self.offset)


def _unpack(packed: torch.Tensor | _View) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.tensor()


@contextmanager
def _gradients_kept(parameters: Iterable[nn.Parameter], most: int | None) -> Iterator[None]:
    """Drop gradients when later ones come, as updates in backward do."""
    kept: deque[nn.Parameter] = deque()

    def ready(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        kept.append(parameter)
        while most is not None and len(kept) > most:
            kept.popleft().grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(ready)
        for parameter in parameters
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _loss_of(output: Any) -> torch.Tensor:
    """What backward begins with."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None:
        found = next(
            (v for v in tree_leaves(output) if isinstance(v, torch.Tensor) and v.requires_grad),
            None,
        )
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ConfigError(
            "predict_memory: the model's output has no tensor with a gradient. Pass inputs with "
            "which it computes a loss."
        )
    return found if found.dim() == 0 else found.sum()
