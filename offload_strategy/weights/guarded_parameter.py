"""Parameters out of their block's turn: told apart by a class that sees every touch.

[Note: guarded parameters]
While a block computes, its parameters are plain `nn.Parameter`. At any other time they are of a
class whose `__torch_function__` sees whatever touches them, because their bytes may be elsewhere.
What only asks for shape, dtype, strides or the gradient is answered without them; everything else
brings them back first. Where they are away, the parameter has one element of NaN, expanded to its
shape: what gets past the class (C++ code, mostly) computes with NaN, never with plausible zeros.

A touch may change the bytes, at once or through an alias it returns, so what was touched is taken
for changed, and it is not taken away while anybody else holds its memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

_Tensor = torch.Tensor


class Home(Protocol):
    """Who has the bytes of a guarded parameter."""

    @property
    def form(self) -> torch.Tensor:
        """A tensor on the meta device with its shape, strides and dtype."""

    @property
    def here(self) -> bool:
        """Whether the bytes are in memory, so that the parameter answers for itself."""

    def begin_touch(self) -> None:
        """Bring the bytes back, and keep them; they may be changed from now on."""

    def saving(self) -> AbstractContextManager[bool]:
        """Within, what autograd saves is found again; False where that cannot be."""

    def bind(self) -> None:
        """Autograd has saved the parameter itself, and would find what stands for it."""

    def end_touch(self) -> None:
        """They need not be kept any more."""


_homes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


_GRAD: Any = _Tensor.grad
_GETTERS = (
    "_backward_hooks _base _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu "
    "is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse is_sparse_csr "
    "is_xpu itemsize layout name nbytes ndim output_nr requires_grad retains_grad shape"
)
_SETTERS = "_backward_hooks _post_accumulate_grad_hooks grad requires_grad"

#: Need nothing of the bytes, and are the same for the stand-in of one element.
_HARMLESS: frozenset[Any] = frozenset(
    [
        *(getattr(_Tensor, name).__get__ for name in _GETTERS.split()),
        *(getattr(_Tensor, name).__set__ for name in _SETTERS.split()),
        _GRAD.__delete__,
        _Tensor.size,
        _Tensor.dim,
        _Tensor.numel,
        _Tensor.nelement,
        _Tensor.ndimension,
        _Tensor.element_size,
        _Tensor.get_device,
        _Tensor.is_floating_point,
        _Tensor.is_complex,
        _Tensor.is_signed,
        _Tensor.is_inference,
        _Tensor.is_conj,
        _Tensor.is_neg,
        _Tensor.requires_grad_,
        _Tensor.register_hook,
        _Tensor.register_post_accumulate_grad_hook,
        _Tensor.retain_grad,
        _Tensor.__len__,
        _Tensor.__hash__,
        torch.is_tensor,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_same_size,
        torch.numel,
    ]
)

#: Are answered by the form: the stand-in has other strides.
_ABOUT_FORM: frozenset[Any] = frozenset(
    [_Tensor.stride, _Tensor.is_contiguous, _Tensor.storage_offset, _Tensor.dim_order]
)


class GuardedParameter(nn.Parameter):
    """A parameter of a streamed model out of its block's turn; see [Note: guarded parameters]."""

    #: For whoever asks whether a tensor is a plain one: it is, but for where its bytes are.
    stands_for_plain = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Bring back the bytes of what is touched, then go on as with plain parameters."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not kwargs.get("materialize_grads"):
            return func(args[0], _edges(args[1]), **kwargs)
        if func is torch.autograd.backward and kwargs.get("inputs") is not None:
            return func(*args, **{**kwargs, "inputs": _edges(kwargs["inputs"])})
        if func in _ABOUT_FORM:
            home = _homes.get(args[0])
            if home is not None and not home.here:
                return func(home.form, *args[1:], **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        touched: list[Home] = []
        # nn.Parameter(parameter) wants one of the same class: it is plain until it leaves.
        again = func is _Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__
        try:
            # All that the call is given must be here at once, and until it is over.
            for parameter in list(_guarded_in((args, kwargs))):
                home = _homes.get(parameter)
                if home is not None:
                    home.begin_touch()
                    touched.append(home)
            if not touched:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            with touched[0].saving() as found_again, torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if not found_again and _is_in_graph(result):
                for home in touched:
                    home.bind()
            if again:
                with torch._C.DisableTorchFunctionSubclass():
                    result = _Tensor._make_subclass(nn.Parameter, result)
            return result
        finally:
            for home in touched:
                home.end_touch()
            if again:
                unguard(args[0])

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, which `__torch_function__` does not see."""
        function = GuardedParameter.__torch_function__
        return function(_Tensor.set_, (type(self),), (self, *args), kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """As torch's, which `__torch_function__` does not see."""
        function = GuardedParameter.__torch_function__
        return function(_Tensor.as_subclass, (type(self),), (self, cls))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with a copy of the values."""
        if id(self) not in memo:
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the plain parameter that it stands for."""
        plain = self._plain()
        plain.__dict__.update(self.__dict__)
        return plain.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        """As the plain parameter that it stands for."""
        return repr(self._plain())

    def _plain(self) -> nn.Parameter:
        """A plain parameter of the same memory."""
        return nn.Parameter(self.detach(), self.requires_grad)


def _edges(inputs: Sequence[Any]) -> list[Any]:
    """With respect to what `torch.autograd.grad` is asked for gradients: it needs no values."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            torch.autograd.graph.get_gradient_edge(each)
            if type(each) is GuardedParameter and each.requires_grad
            else each
            for each in inputs
        ]


def _guarded_in(value: Any) -> Iterator[GuardedParameter]:
    """The guarded parameters among arguments, also those in lists."""
    if type(value) is GuardedParameter:
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _guarded_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _guarded_in(each)


def _is_in_graph(result: Any) -> bool:
    """Whether autograd may have saved something for what a function returned."""
    if isinstance(result, torch.Tensor):
        return result.grad_fn is not None
    return isinstance(result, (list, tuple)) and any(map(_is_in_graph, result))


def guard(parameter: nn.Parameter, home: Home) -> None:
    """See every touch of a parameter from now on."""
    _homes[parameter] = home
    parameter.__class__ = GuardedParameter


def unguard(parameter: nn.Parameter) -> None:
    """Make it a plain parameter again."""
    parameter.__class__ = nn.Parameter


def forget(parameter: nn.Parameter) -> None:
    """Unguard it for good."""
    unguard(parameter)
    _homes.pop(parameter, None)


def place_bytes(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter have its bytes elsewhere, whatever its class is."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = values


def nothing_like(form: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One element of NaN, or of what is nearest to it, expanded to a shape."""
    element = torch.empty(1, dtype=form.dtype, device=device)
    if form.is_floating_point() or form.is_complex():
        element.fill_(float("nan"))
    else:
        element.view(torch.uint8).fill_(0x55)
    return element.expand(form.shape) if form.dim() else element.reshape(())
