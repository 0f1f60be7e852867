"""Callbacks that keep nobody alive."""

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
