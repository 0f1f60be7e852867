"""What Ctrl-C must not leave half done: bookkeeping, and grad mode and other modes of PyTorch.

A signal may raise between entering a context manager and its body. The exit is then never called
or, for a generator, called when the traceback is freed at some later time. Either way grad mode
would stay off, and a notebook could no longer train.
"""

from __future__ import annotations

import sys
import threading

# The C functions: those of `signal` wrap them to make enums of numbers, and cost ten times as much.
# A section is entered for every move.
from _signal import SIGINT, getsignal, signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from traceback import clear_frames
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_P = ParamSpec("_P")
_T = TypeVar("_T")

_main_thread = threading.main_thread().ident


def clear_last_traceback() -> None:
    """Free what the last exception that an interactive session has shown keeps alive.

    A notebook keeps the traceback of an interrupted cell, or of one that ran out of memory, and
    with it the engine, the model and all tickets, until another exception follows.
    """
    shown: BaseException | None = getattr(sys, "last_value", None)
    seen = set[int]()
    while shown is not None and id(shown) not in seen:
        seen.add(id(shown))
        if shown.__traceback__ is not None:
            clear_frames(shown.__traceback__)
            shown.__traceback__.tb_next = None  # a frame also has the closure of its function
        shown = shown.__cause__ or shown.__context__


class UninterruptedSection:
    """Holds SIGINT back on the main thread while bookkeeping is half done, then delivers it.

    A KeyboardInterrupt between "this block is under way" and "the backend has it" would leave a
    move that never ends. Waits do not belong inside: they must stay interruptible.
    """

    __slots__ = ("_handler", "_held_back")

    #: Whether the main thread is inside one already; the outermost does the work.
    _inside = False

    def __enter__(self) -> None:
        self._handler: Any = None
        self._held_back: FrameType | bool | None = False
        if UninterruptedSection._inside or threading.get_ident() != _main_thread:
            return
        handler = getsignal(SIGINT)
        # The default action ends the process, and what is ignored needs no holding back.
        if callable(handler):
            self._handler = handler
            signal(SIGINT, self._hold_back)
            UninterruptedSection._inside = True

    def __exit__(self, *_: object) -> None:
        handler = self._handler
        if handler is None:
            return
        UninterruptedSection._inside = False
        signal(SIGINT, handler)
        if self._held_back is not False:
            handler(SIGINT, self._held_back)

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._held_back = frame


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
def default_modes() -> Iterator[None]:
    """Disable grad mode and the user's modes and transforms while tensors are moved.

    Selective checkpointing counts operations, inference mode creates tensors that cannot be
    trained, and functorch transforms wrap tensors. Unlike `torch.no_grad`, it never restores grad
    mode late: use it within a function decorated with `keeps_grad_mode`, which restores what this
    cannot.
    """
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
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
