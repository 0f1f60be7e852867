"""The recorder: one record a move, and the sums that metrics are read from."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from enum import StrEnum
from typing import NamedTuple

#: The three clients of the store, as they appear in metric keys.
CLIENTS = ("activations", "optimizer", "parameters")


#: Shorter waits are counted, but make no record of their own.
_WORTH_A_RECORD_SECONDS = 1e-5


class Direction(StrEnum):
    """Which way bytes move, seen from the training process."""

    READ = "read"
    WRITE = "write"


class MoveRecord(NamedTuple):
    """One finished move between a path and memory (a striped ticket makes one on each path).

    Args:
        client: who asked (one of `CLIENTS`).
        tier: name of the tier that was read or written.
        path: which path of the tier.
        direction: read or written.
        nbytes: bytes moved.
        queued_at, started_at, finished_at: `time.perf_counter()` seconds.
    """

    client: str
    tier: str
    path: str
    direction: Direction
    nbytes: int
    queued_at: float
    started_at: float
    finished_at: float


class StallRecord(NamedTuple):
    """Time in which training waited for moves.

    Args:
        client: whose bytes were waited for (one of `CLIENTS`).
        started_at, finished_at: `time.perf_counter()` seconds.
    """

    client: str
    started_at: float
    finished_at: float


class _BusyClock:
    """Seconds during which at least one move was under way."""

    __slots__ = ("_active", "_since", "_total")

    def __init__(self) -> None:
        self._active = 0
        self._since = 0.0
        self._total = 0.0

    def enter(self, now: float) -> None:
        if self._active == 0:
            self._since = now
        self._active += 1

    def leave(self, now: float) -> None:
        self._active -= 1
        if self._active == 0:
            self._total += now - self._since

    def seconds(self, now: float) -> float:
        return self._total + (now - self._since if self._active else 0.0)


class Recorder:
    """Thread-safe sums over all moves of one engine, plus the latest records.

    Args:
        keep: how many of the latest `MoveRecord`s, and `StallRecord`s, to keep for traces.
    """

    def __init__(self, keep: int = 65536) -> None:
        self.started_at = time.perf_counter()
        self.moves: deque[MoveRecord] = deque(maxlen=keep)
        self.stalls: deque[StallRecord] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self._client_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._tier_bytes: dict[tuple[str, Direction], int] = defaultdict(int)
        self._stall_seconds: dict[str, float] = defaultdict(float)
        self._read_stall_seconds: dict[str, float] = defaultdict(float)
        self._queue_seconds: dict[tuple[str, Direction], float] = defaultdict(float)
        self._busy: dict[tuple[str, Direction], _BusyClock] = defaultdict(_BusyClock)
        self._any_busy = _BusyClock()

    def move_started(self, tier: str, direction: Direction) -> float:
        """Note that a move begins now; returns the time."""
        now = time.perf_counter()
        with self._lock:
            self._busy[tier, direction].enter(now)
            self._any_busy.enter(now)
        return now

    def move_finished(self, record: MoveRecord, *, completed: bool) -> None:
        """Note that a started move ended; its bytes count only if it `completed`."""
        with self._lock:
            self._busy[record.tier, record.direction].leave(record.finished_at)
            self._any_busy.leave(record.finished_at)
            if completed:
                self.moves.append(record)
                verb = "written" if record.direction is Direction.WRITE else "read"
                self._client_bytes[record.client, verb] += record.nbytes
                self._tier_bytes[record.tier, record.direction] += record.nbytes
                self._queue_seconds[record.tier, record.direction] += (
                    record.started_at - record.queued_at
                )

    def forwarded(self, client: str, nbytes: int) -> None:
        """Count bytes handed back from memory because their write was not over."""
        with self._lock:
            self._client_bytes[client, "forwarded"] += nbytes

    def stalled(self, client: str, since: float, *, reading: bool = False) -> None:
        """Count the time since `since` (`time.perf_counter()`): training waited for a move.

        Args:
            client: whose bytes were waited for.
            since: when that began.
            reading: whether for a read; else for room, which writes make.
        """
        now = time.perf_counter()
        with self._lock:
            self._stall_seconds[client] += now - since
            if reading:
                self._read_stall_seconds[client] += now - since
            if now - since > _WORTH_A_RECORD_SECONDS:
                self.stalls.append(StallRecord(client, since, now))

    def client_bytes(self, client: str, verb: str) -> int:
        """Bytes `written`, `read` or `forwarded` for a client so far."""
        with self._lock:
            return self._client_bytes[client, verb]

    def tier_bytes(self, tier: str, direction: Direction) -> int:
        """Bytes moved to or from a tier so far."""
        with self._lock:
            return self._tier_bytes[tier, direction]

    def stall_seconds(self, client: str) -> float:
        """Seconds that training waited for a client's moves so far."""
        with self._lock:
            return self._stall_seconds[client]

    def read_stall_seconds(self, client: str) -> float:
        """Of these, the seconds of waiting for reads; the others are for room."""
        with self._lock:
            return self._read_stall_seconds[client]

    def queue_seconds(self, tier: str, direction: Direction) -> float:
        """Seconds that finished moves had waited in the queues of a tier, summed."""
        with self._lock:
            return self._queue_seconds[tier, direction]

    def bandwidth_GBps(self, tier: str, direction: Direction) -> float:
        """Bytes per second (in 1e9) while the path was busy in that direction; 0 if never."""
        with self._lock:
            seconds = self._busy[tier, direction].seconds(time.perf_counter())
            return self._tier_bytes[tier, direction] / seconds / 1e9 if seconds > 0 else 0.0

    def busy_seconds(self) -> float:
        """Seconds in which any move was under way."""
        with self._lock:
            return self._any_busy.seconds(time.perf_counter())

    def hidden_share(self) -> float:
        """Share of transfer time that training did not wait for, 0 to 1 (1 if nothing moved)."""
        busy = self.busy_seconds()
        with self._lock:
            stalled = sum(self._stall_seconds.values())
        return 1.0 if busy <= 0 else min(1.0, max(0.0, 1.0 - stalled / busy))
