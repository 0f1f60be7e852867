"""Callbacks and hooks that keep nobody alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., None]:
    """A function that calls a bound method as long as its object lives, and then does nothing.

    Args:
        method: bound to an object, which is not kept alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*arguments)

    return call


class WeakHook:
    """A module hook that calls a method while its object lives.

    A copy or a pickle of it, which comes with a copy of the module, does nothing.

    Args:
        method: a bound method, whose object is not kept alive; None for a hook that does nothing.
        first: arguments before those of the hook.
    """

    def __init__(self, method: Any = None, *first: Any) -> None:
        self._object = None if method is None else weakref.ref(method.__self__)
        self._function = None if method is None else method.__func__
        self._first = first

    def __call__(self, *arguments: Any) -> None:
        """Call the method."""
        alive = None if self._object is None else self._object()
        if alive is not None and self._function is not None:
            self._function(alive, *self._first, *arguments)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(self), ()
