"""Backends that do what a test says, when it says so."""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.queues.moves import Move, Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import Priority
from offload_strategy.io.regions.region import Extent, Region
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, MiB, round_up


class ManualBackend(Backend):
    """Holds every request until it is told to complete it; really moves the bytes then.

    When `at_once` is set it completes requests at once, with `error` if there is one.
    """

    def __init__(self, depth: int = 1, block_size: int = PAGE_BYTES) -> None:
        super().__init__(threads=depth, block_size=block_size)
        self.waiting: deque[BlockRequest] = deque()
        self.closed = False
        self.at_once = False
        self.error: BaseException | None = None

    def submit(self, requests: Sequence[BlockRequest]) -> None:
        if self.closed:
            raise RuntimeError("the backend is closed")
        self.waiting.extend(requests)
        if self.at_once:
            self.complete(self.error, at=len(self.waiting) - 1)

    def close(self) -> None:
        self.closed = True

    def complete(self, error: BaseException | None = None, at: int = 0) -> BlockRequest:
        """End one of the waiting requests, well or with an error."""
        request = self.waiting[at]
        del self.waiting[at]
        if error is None:
            if request.before is not None:
                request.before()
            memory = (ctypes.c_char * request.nbytes).from_address(request.address)
            if request.write:
                os.pwrite(request.fd, bytes(memory), request.offset)
            else:
                memory[:] = os.pread(request.fd, request.nbytes, request.offset)
            if request.after is not None:
                try:
                    request.after()
                except Exception as caught:
                    error = caught
        try:
            request.on_done(error)
        finally:
            del error  # its traceback refers to this frame
        return request

    def complete_all(self) -> None:
        while self.waiting:
            self.complete()


def plain_region(directory: Path, capacity: int) -> Region:
    """A space for `ManualBackend`, which does not align its memory."""
    return Region(directory, "nvme", capacity, direct=False)


def make_move(
    queue: PathQueue,
    page: int,
    pages: float = 1,
    priority: Priority = Priority.WRITE_BACK,
    misalignment: int = 0,
    **options: Any,
) -> Move:
    """A move of memory that begins with a page if not misaligned; a write if it is a write-back."""
    nbytes = int(pages * PAGE_BYTES)
    room = round_up(nbytes, PAGE_BYTES)
    memory = (ctypes.c_char * (room + 2 * PAGE_BYTES))()
    options.setdefault("on_end", lambda move: None)
    write = options.pop("write", priority is Priority.WRITE_BACK)
    return Move(
        client="activations",
        direction=Direction.WRITE if write else Direction.READ,
        stripes=[Stripe(queue, Extent(page * PAGE_BYTES, room), 0, nbytes)],
        address=round_up(ctypes.addressof(memory), PAGE_BYTES) + misalignment,
        nbytes=nbytes,
        priority=priority,
        keep_alive=memory,
        **options,
    )


def submit(*args: Any, **options: Any) -> Move:
    move = make_move(*args, **options)
    move.submit()
    return move


class SimulatedBackend(Backend):
    """A device of a given speed, on a clock that only its transfers advance; moves no bytes."""

    def __init__(self, read: float, write: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(threads=4, block_size=4 * MiB)
        self.now = 0.0
        self._seconds_per_byte = {False: 1 / read, True: 1 / write}
        monkeypatch.setattr(sys.modules[probe.__module__], "_clock", lambda: self.now)

    def submit(self, requests: Sequence[BlockRequest]) -> None:
        (request,) = requests
        self.now += request.nbytes * self._seconds_per_byte[request.write]
        request.on_done(None)
