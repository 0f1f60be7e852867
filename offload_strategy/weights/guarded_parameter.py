"""Guarded parameters: a class that intercepts every access to a weight outside its block.

[Note: guarded parameters]
While a block computes, its parameters are `ResidentParameter`: plain ones that tell their owner of
accesses whose changes no version counter sees (`.data`, NumPy). At any other time their bytes may
be offloaded, so they are of a class whose `__torch_function__` intercepts every access. Queries for
shape, dtype, strides or the gradient are answered without the bytes; everything else loads them
first. While the bytes are offloaded, the parameter's data is one NaN element expanded to its shape:
code that bypasses the class (mostly C++) computes with NaN, never with plausible zeros.

An access may change the bytes, at once or through an alias that it returns. Accessed weights are
therefore treated as changed, and they are not offloaded while anybody else holds their memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

_Tensor = torch.Tensor


#: The `StreamedWeight` of each guarded or resident parameter.
_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_GRAD: Any = _Tensor.grad
_DATA: Any = _Tensor.data
_SET_DATA = _DATA.__set__
_GETTERS = (
    "_backward_hooks _base _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu "
    "is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr "
    "is_xpu itemsize layout name nbytes ndim output_nr requires_grad retains_grad shape"
)
_SETTERS = "_backward_hooks _post_accumulate_grad_hooks grad requires_grad"
_METHODS = (
    "size dim numel nelement ndimension element_size get_device is_floating_point is_complex "
    "is_signed is_inference is_conj is_neg requires_grad_ register_hook "
    "register_post_accumulate_grad_hook retain_grad __len__ __hash__"
)

#: Functions that need no bytes and give the same result for the NaN placeholder.
_METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    [
        *(getattr(_Tensor, name).__get__ for name in _GETTERS.split()),
        *(getattr(_Tensor, name).__set__ for name in _SETTERS.split()),
        *(getattr(_Tensor, name) for name in _METHODS.split()),
        _GRAD.__delete__,
        torch.is_tensor,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_same_size,
        torch.numel,
    ]
)

#: Functions that are answered by `form`, because the placeholder has other strides.
_LAYOUT_QUERIES: frozenset[Any] = frozenset(
    [_Tensor.stride, _Tensor.is_contiguous, _Tensor.storage_offset, _Tensor.dim_order]
)


class ResidentParameter(nn.Parameter):
    """A streamed parameter while its block computes; see [Note: guarded parameters]."""

    #: Marks it as a plain parameter for checks that refuse tensor subclasses.
    stands_for_plain = True

    @property
    def data(self) -> torch.Tensor:
        """An alias of the values, which are taken to change through it."""
        _note_change(self)
        values: torch.Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if (owner := _owners.get(self)) is not None:
            owner.changed = True
            owner.replacements += 1
        _SET_DATA(self, values)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return an array of the values, which are taken to change through it."""
        _note_change(self)
        return super().numpy(*args, **kwargs)

    def detach(self) -> torch.Tensor:
        """Return what a plain parameter does, and from `nn.Parameter(parameter)` a plain one."""
        values = super().detach()
        if sys._getframe(1).f_code is not nn.Parameter.__new__.__code__:
            return values
        _note_change(self)
        unguard(self)  # the result must be of the same class
        return _Tensor._make_subclass(nn.Parameter, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with a copy of the values."""
        return nn.Parameter(self.detach().clone(), self.requires_grad)


class GuardedParameter(ResidentParameter):
    """A streamed parameter outside its block; see [Note: guarded parameters]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Load the bytes of all guarded arguments, then call the function on plain parameters."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not kwargs.get("materialize_grads"):
            return func(args[0], _edges(args[1]), **kwargs)
        if func is torch.autograd.backward and kwargs.get("inputs") is not None:
            return func(*args, **{**kwargs, "inputs": _edges(kwargs["inputs"])})
        if func in _LAYOUT_QUERIES:
            owner = _owners.get(args[0])
            if owner is not None and not owner.is_resident:
                return func(owner.form, *args[1:], **kwargs)
        if func in _METADATA_FUNCTIONS or func in _LAYOUT_QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        accessed: list[Any] = []
        try:
            # All arguments must be resident together until the call ends.
            for parameter in list(_guarded_in((args, kwargs))):
                owner = _owners.get(parameter)
                if owner is not None:
                    owner.begin_access()
                    accessed.append(owner)
            if not accessed:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            saving = accessed[0].stream.saving()
            with saving as found_again, torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            results = (each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
            if not found_again and any(each.grad_fn is not None for each in results):
                for owner in accessed:
                    owner.pinned = True
            return result
        finally:
            for owner in accessed:
                owner.end_access()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Route a method that `__torch_function__` does not intercept."""
        return self.__torch_function__(_Tensor.set_, (type(self),), (self, *args), kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Route a method that `__torch_function__` does not intercept."""
        return self.__torch_function__(_Tensor.as_subclass, (type(self),), (self, cls))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def _plain(self) -> nn.Parameter:
        """Return a plain parameter that shares the memory."""
        return nn.Parameter(self.detach(), self.requires_grad)


def _note_change(parameter: ResidentParameter) -> None:
    owner = _owners.get(parameter)
    if owner is not None:
        owner.changed = True


def _edges(inputs: Sequence[Any]) -> list[Any]:
    """Replace guarded inputs of `torch.autograd.grad` by gradient edges, which need no values."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            torch.autograd.graph.get_gradient_edge(each)
            if type(each) is GuardedParameter and each.requires_grad
            else each
            for each in inputs
        ]


def _guarded_in(value: Any) -> Iterator[GuardedParameter]:
    """Yield the guarded parameters among nested arguments, also in subclasses of containers."""
    if type(value) is GuardedParameter:
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _guarded_in(each)


def guard(parameter: nn.Parameter, owner: Any) -> None:
    """Intercept every access to a parameter of a `StreamedWeight` from now on."""
    _owners[parameter] = owner
    parameter.__class__ = GuardedParameter


def expose(parameter: nn.Parameter) -> None:
    """Let a block compute with a parameter."""
    parameter.__class__ = ResidentParameter


def unguard(parameter: nn.Parameter, *, for_good: bool = False) -> None:
    """Make it a plain parameter again."""
    parameter.__class__ = nn.Parameter
    if for_good:
        _owners.pop(parameter, None)


def set_data(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the data of a parameter, guarded or not."""
    with torch._C.DisableTorchFunctionSubclass():
        _SET_DATA(parameter, values)


def nan_placeholder(form: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one NaN element (for integers, a 0x55 pattern) expanded to a shape."""
    element = torch.empty(1, dtype=form.dtype, device=device)
    if form.is_floating_point() or form.is_complex():
        element.fill_(float("nan"))
    else:
        element.view(torch.uint8).fill_(0x55)
    return element.expand(form.shape) if form.dim() else element.reshape(())
