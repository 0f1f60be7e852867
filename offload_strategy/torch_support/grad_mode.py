"""Changing grad mode and other modes so that Ctrl-C cannot leave them changed.

A signal may raise between entering a context manager and its body. The exit is then never called
or, for a generator, called when the traceback is freed at some later time. Either way grad mode
would stay off, and a notebook could no longer train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_P = ParamSpec("_P")
_T = TypeVar("_T")


def keeps_grad_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Restore grad mode however a function ends; for functions that user code calls."""

    @wraps(function)
    def keeping(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        before = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        finally:
            # `torch.set_grad_enabled` is a Python function, where signals are delivered.
            torch._C._set_grad_enabled(before)

    return keeping


@contextmanager
def no_grad() -> Iterator[None]:
    """Like `torch.no_grad`, but never restores the mode late; for use within generators.

    Use it within a function decorated with `keeps_grad_mode`, which restores what this cannot.
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        yield
    except GeneratorExit:
        # The body never ran, and the mode may have changed since.
        raise
    except BaseException:
        torch._C._set_grad_enabled(before)
        raise
    torch._C._set_grad_enabled(before)


@contextmanager
def default_modes() -> Iterator[None]:
    """Disable the user's modes and transforms while tensors are moved.

    Selective checkpointing counts operations, inference mode creates tensors that cannot be
    trained, and functorch transforms wrap tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(no_grad())
        yield
