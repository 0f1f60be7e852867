"""A tensor without memory: what is read of it past PyTorch's dispatcher.

[Note: reads that bypass the dispatcher]
Operators arrive in `__torch_dispatch__`. What looks at memory directly does not: it would find
none, and lose data or crash. Every such method is overridden here. Where one was overlooked, or
called from C++, PyTorch raises an error when it asks for the address, as it does for its own
tensors without memory.
"""

from __future__ import annotations

import copy
from typing import Any, Self, TypeVar

import torch

from offload_strategy.optimizer.gradients.gradient_backing import Backing
from offload_strategy.optimizer.gradients.gradient_sources import Consumed, Form, lasting

_Stands = TypeVar("_Stands", bound="Wrapper")


class _Absent:
    """Hides what a class has inherited."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._name)


class Wrapper(torch.Tensor):
    """Shape, strides, dtype and device of a tensor; a `Backing` has the values."""

    _backing: Backing
    #: Whether other values were put in its place (`tensor.data = ...`).
    _replaced: bool

    # What C code of other libraries would use to get at the memory. Without it they use __dlpack__.
    __dlpack_c_exchange_api__ = _Absent()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def over(cls, backing: Backing, form: Form) -> Self:
        """A stand-in for the values of a backing."""
        with lasting():
            made: Self = torch.Tensor._make_wrapper_subclass(
                cls,
                form.shape,
                strides=form.strides,
                storage_offset=form.offset,
                dtype=form.dtype,
                device=form.device,
                requires_grad=False,
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._backing = backing
        made._replaced = False
        return made

    # ------------------------------------------------------------------ aliases of the memory
    @property
    def data(self) -> Self:
        """An alias, as of a plain tensor; see `alias_of`."""
        return alias_of(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        adopt(self, values)

    def numpy(self, *args: Any, **options: Any) -> Any:
        """As of a plain tensor: shares its memory."""
        return self._backing.pin().numpy(*args, **options)

    def data_ptr(self) -> int:
        """As of a plain tensor."""
        return self._backing.pin().data_ptr()

    def const_data_ptr(self) -> int:
        """As of a plain tensor."""
        return self.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of a plain tensor."""
        return self._backing.pin().untyped_storage()

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        return self._backing.pin().__dlpack__(*args, **options)

    def apply_(self, *args: Any) -> Self:
        """As of a plain tensor."""
        self._backing.pin().apply_(*args)
        return self

    def map_(self, *args: Any) -> Self:
        """As of a plain tensor."""
        self._backing.pin().map_(*map(_plain, args))
        return self

    def map2_(self, *args: Any) -> Self:
        """As of a plain tensor."""
        self._backing.pin().map2_(*map(_plain, args))
        return self

    def __copy__(self) -> torch.Tensor:
        return copy.copy(self._backing.pin())

    # ------------------------------------------------------------------ copies
    def tolist(self) -> Any:
        """As of a plain tensor."""
        return self._backing.read().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        known = memo.get(id(self))
        if known is None:
            if self._backing.is_pinned:
                # With the memo, so that what shares its storage goes on to do so.
                known = copy.deepcopy(self._backing.pin(), memo)
            else:
                known = self._own_copy()
            memo[id(self)] = known
        copied: torch.Tensor = known
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        pinned = self._backing.is_pinned
        return (self._backing.pin() if pinned else self._own_copy()).__reduce_ex__(protocol)

    def _own_copy(self) -> torch.Tensor:
        """A plain tensor with the values, and with memory of its own and no more than that."""
        return Form.of(self).empty().copy_(self._backing.read())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if isinstance(self._backing.source, Consumed) and not self._backing.is_pinned:
            return f"tensor(consumed, size={tuple(self.shape)}, dtype={self.dtype})"
        return repr(self._backing.read())


# Functions, as the names of methods would meet those of PyTorch's and of users' own attributes.
def alias_of(stand_in: _Stands) -> _Stands:
    """Another stand-in with the same values: a change of one is seen in both."""
    made = stand_in.over(stand_in._backing, Form.of(stand_in))
    made._replaced = stand_in._replaced
    return made


def adopt(stand_in: Wrapper, values: torch.Tensor) -> None:
    """Give it these values, whatever their shape and dtype, as ``tensor.data = values`` does."""
    if isinstance(values, Wrapper):
        backing = values._backing
        if backing is stand_in._backing and Form.of(values) == Form.of(stand_in):
            return
    else:
        backing = Backing.pinned_on(values.detach())
    # PyTorch's own setter: it has shape, strides, dtype and device changed.
    looks = stand_in.over(backing, Form.of(values))
    torch.Tensor.data.__set__(stand_in, looks)  # type: ignore[attr-defined]
    stand_in._backing = backing
    stand_in._replaced = True


def _plain(value: Any) -> Any:
    return value._backing.read() if isinstance(value, Wrapper) else value
