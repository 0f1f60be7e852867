"""Ctrl-C waits for the end of a few lines that must not be cut in two."""

from __future__ import annotations

import threading

# The C functions: those of `signal` wrap them to make enums of numbers, and cost ten times as much.
# A section is entered for every move.
from _signal import SIGINT, getsignal, signal
from types import FrameType, TracebackType
from typing import Any

_main_thread = threading.main_thread().ident


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler = self._handler
        if handler is None:
            return
        UninterruptedSection._inside = False
        signal(SIGINT, handler)
        if self._held_back is not False:
            handler(SIGINT, self._held_back)

    def _hold_back(self, number: int, frame: FrameType | None) -> None:
        self._held_back = frame
