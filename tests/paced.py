"""A path that is as slow as a test wants it to be, whatever disk lies below."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest

# A thread that comes back this soon has not kept the path idle: it slept a little too long, or had
# to wait for the interpreter. What it was late, a path with a queue of its own would not have been.
_LATE_SECONDS = 0.02


class PacedBackend(PosixBackend):
    """Moves blocks as the plain backend does, at so many bytes per second in each direction.

    Args:
        read: bytes per second; None for as fast as it goes.
        write: likewise.
        options: of the plain backend.
    """

    def __init__(
        self, *, read: float | None = None, write: float | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._rates = {False: read, True: write}
        self._free_at = {False: 0.0, True: 0.0}
        self._pace = threading.Lock()

    def move(self, request: BlockRequest) -> None:
        super().move(request)
        self._spend(request.write, request.nbytes)

    def move_adjacent(self, requests: Sequence[BlockRequest]) -> bool:
        moved = super().move_adjacent(requests)
        if moved:
            self._spend(requests[0].write, sum(request.nbytes for request in requests))
        return moved

    def _spend(self, write: bool, nbytes: int) -> None:
        """Wait until the path would have moved this, behind what it was given before."""
        rate = self._rates[write]
        if rate is None:
            return
        with self._pace:
            now, free_at = time.perf_counter(), self._free_at[write]
            begin = free_at if now - free_at < _LATE_SECONDS else now
            self._free_at[write] = until = begin + nbytes / rate
        time.sleep(max(0.0, until - time.perf_counter()))
