"""One move of bytes between host memory and an extent, and its life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from offload_strategy.storage import Extent
from offload_strategy.telemetry import Direction


class Priority(IntEnum):
    """Which queued block goes next; lower overtakes higher."""

    NEEDED_NOW = 0
    PREFETCH = 1
    WRITE_BACK = 2


class MoveState(Enum):
    """QUEUED -> RUNNING -> DONE | FAILED | CANCELLED; a queued move may be cancelled outright."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Move:
    """Bytes on their way; the queue that runs it is its only writer.

    Args:
        client: who asked, for metrics.
        direction: read from, or written to, the path.
        extent: where on the path.
        address: where in host memory.
        nbytes: how many bytes.
        priority: of its blocks, while they are queued.
        keep_alive: what owns the memory; dropped when the move ends.
        before: called on the I/O side before the first block, for instance to wait for a device
            copy into the memory that is to be written.
        on_end: called once when the move has ended, on an I/O thread or on the thread that
            cancelled it. Must not raise.
    """

    client: str
    direction: Direction
    extent: Extent
    address: int
    nbytes: int
    priority: Priority
    keep_alive: Any = field(repr=False)
    on_end: Callable[[Move], None] = field(repr=False)
    before: Callable[[], None] | None = field(default=None, repr=False)
    state: MoveState = MoveState.QUEUED
    error: BaseException | None = None
    queued_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    finished_at: float = 0.0
    next_block: int = 0
    blocks_under_way: int = 0
    ended: threading.Event = field(default_factory=threading.Event, repr=False)
