"""A tensor without memory: methods that bypass PyTorch's dispatcher.

[Note: reads that bypass the dispatcher]
Operators arrive in `__torch_dispatch__`. What accesses memory directly does not: it would find
none, and lose data or crash. Every such method is overridden here. Where one was overlooked, or
called from C++, PyTorch raises an error when it asks for the address, as for its own tensors
without memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch

from offload_strategy.optimizer.gradients.gradient_backing import GradientBacking
from offload_strategy.optimizer.gradients.gradient_sources import (
    TensorMetadata,
    outside_inference_mode,
)

_Wrapper = TypeVar("_Wrapper", bound="TensorWrapper")


class _Absent:
    """Hides an inherited attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._name)


def _on_memory(name: str) -> Callable[..., Any]:
    """Make a method of the plain tensor, which gives out its memory."""

    def method(self: TensorWrapper, *args: Any, **options: Any) -> Any:
        return getattr(self.backing.materialize(), name)(*args, **options)

    return method


def _in_place(name: str) -> Callable[..., Any]:
    """Make a method that changes the plain tensor and returns the wrapper."""

    def method(self: TensorWrapper, *args: Any) -> Any:
        plain = [a.backing.read() if isinstance(a, TensorWrapper) else a for a in args]
        getattr(self.backing.materialize(), name)(*plain)
        return self

    return method


class TensorWrapper(torch.Tensor):
    """Shape, strides, dtype and device of a tensor whose values a `GradientBacking` has."""

    #: Shared by all aliases; `tensor.data = ...` puts another in its place.
    backing: GradientBacking

    # What C code of other libraries would use to get at the memory. Without it they use __dlpack__.
    __dlpack_c_exchange_api__ = _Absent()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def over(cls, backing: GradientBacking, metadata: TensorMetadata) -> Self:
        """Wrap a backing."""
        with outside_inference_mode():
            made: Self = torch.Tensor._make_wrapper_subclass(
                cls,
                metadata.shape,
                strides=metadata.strides,
                storage_offset=metadata.offset,
                dtype=metadata.dtype,
                device=metadata.device,
                requires_grad=False,
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.backing = backing
        return made

    @property
    def data(self) -> Self:
        """An alias, as of a plain tensor; see `alias_of`."""
        return alias_of(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        set_values(self, values)

    # ------------------------------------------------------------------ as of the plain tensor
    numpy = _on_memory("numpy")
    data_ptr = _on_memory("data_ptr")
    const_data_ptr = _on_memory("data_ptr")
    untyped_storage = _on_memory("untyped_storage")
    __dlpack__ = _on_memory("__dlpack__")
    apply_ = _in_place("apply_")
    map_ = _in_place("map_")
    map2_ = _in_place("map2_")

    def __copy__(self) -> torch.Tensor:
        return copy.copy(self.backing.materialize())

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.backing.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        known = memo.get(id(self))
        if known is None:
            if self.backing.is_materialized:
                # With the memo, so that what shares its storage goes on to do so.
                known = copy.deepcopy(self.backing.materialize(), memo)
            else:
                known = self._own_copy()
            memo[id(self)] = known
        copied: torch.Tensor = known
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        shared = self.backing.is_materialized
        return (self.backing.materialize() if shared else self._own_copy()).__reduce_ex__(protocol)

    def _own_copy(self) -> torch.Tensor:
        """Copy the values to a plain tensor with no more memory than it needs."""
        return TensorMetadata.of(self).empty().copy_(self.backing.read())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.backing.is_consumed:
            return f"tensor(consumed, size={tuple(self.shape)}, dtype={self.dtype})"
        return repr(self.backing.read())


# Functions, as methods could collide with those of PyTorch and with attributes of users.
def alias_of(wrapper: _Wrapper) -> _Wrapper:
    """Make another wrapper of the same values: a change of one is seen in both."""
    return wrapper.over(wrapper.backing, TensorMetadata.of(wrapper))


def set_values(wrapper: TensorWrapper, values: torch.Tensor) -> None:
    """Replace values, shape and dtype, as ``tensor.data = values`` does."""
    metadata = TensorMetadata.of(values)
    if isinstance(values, TensorWrapper):
        backing = values.backing
        if backing is wrapper.backing and metadata == TensorMetadata.of(wrapper):
            return
    else:
        backing = GradientBacking.materialized(values.detach())
    # PyTorch's own setter changes shape, strides, dtype and device.
    torch.Tensor.data.__set__(wrapper, wrapper.over(backing, metadata))  # type: ignore[attr-defined]
    wrapper.backing = backing
