"""Modules: hooks that do not keep their objects alive, and calls under way."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn


class WeakHook:
    """A callback that calls a method while its object lives, and then does nothing.

    Arguments in `first` precede the hook's, and live as long as it does: without a method it only
    keeps them alive. A copy or pickle, with its module, does nothing either.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *first: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *arguments: Any) -> None:
        """Call the method."""
        if self._method is not None and (method := self._method()) is not None:
            method(*self._first, *arguments)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()


def running_calls() -> Iterator[tuple[int, Any]]:
    """Yield calls of modules on this thread's stack, innermost first: unique number, and module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield id(frame), frame.f_locals.get("self")
        frame = frame.f_back


def calls_of(module: nn.Module) -> list[int]:
    """Return the numbers of the calls of a module on this thread's stack, innermost first."""
    return [call for call, called in running_calls() if called is module]
