"""Grad mode that Ctrl-C leaves as it was.

An exception that a signal raises may come between the begin of a context manager and the block
that it guards: its end is then never called, or, where it is a generator, called when the traceback
goes, which is any time later. Either leaves a notebook in which nothing is trained any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def keeps_grad_mode(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """However a function ends, grad mode is what it was; for what user code calls."""

    @wraps(function)
    def keeping(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        before = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        finally:
            # Not `torch.set_grad_enabled`: signals are looked at where Python functions begin.
            torch._C._set_grad_enabled(before)

    return keeping


@contextmanager
def no_grad() -> Iterator[None]:
    """As `torch.no_grad`, for use within other generators; never ends late.

    Within a function that `keeps_grad_mode`, which restores what this cannot.
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        yield
    except GeneratorExit:
        # The block never began, and others may have changed the mode since.
        raise
    except BaseException:
        torch._C._set_grad_enabled(before)
        raise
    torch._C._set_grad_enabled(before)
