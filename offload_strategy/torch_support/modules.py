"""Modules: hooks that keep nobody alive, calls under way, and the layers that repeat.

Blocks are found automatically: members of a `ModuleList`, `Sequential` or `ModuleDict` that has two
or more children of one class with parameters, at the outermost level.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from torch import nn

#: Their forward uses weights of modules in them, and reads those before it takes a fast path.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class WeakHook:
    """A callback that calls a method while its object lives, and then does nothing.

    Arguments in `first` precede the hook's. A copy or pickle, with its module, does nothing either.
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


def outermost_blocks(
    model: nn.Module,
    classes: Collection[str] = (),
    choose: Callable[[str, nn.Module], bool] | None = None,
    prefix: str = "",
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that are blocks with their names, in the order of registration.

    Instances of module classes named in `classes` are blocks besides repeated layers; `choose`
    says for a module and its name whether it is a block, instead of the search for repeated layers.
    """
    repeated: set[nn.Module] = set()
    if choose is None and isinstance(model, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        by_class: dict[type, list[nn.Module]] = {}
        for child in model.children():
            if next(child.parameters(), None) is not None:
                by_class.setdefault(type(child), []).append(child)
        repeated.update(*(alike for alike in by_class.values() if len(alike) > 1))
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        chosen = choose is not None and choose(path, child)
        named = type(child).__name__ in classes or isinstance(child, WHOLE)
        if chosen or named or child in repeated:
            yield path, child
        else:
            yield from outermost_blocks(child, classes, choose, f"{path}.")
