"""The recorder: one record for each transfer, and the sums for metrics."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import StrEnum
from timeit import default_timer as perf_counter
from typing import NamedTuple, get_args

from offload_strategy.config import Client

#: The three clients of the store, as they appear in metric keys.
CLIENTS: tuple[Client, ...] = get_args(Client)

#: Shorter waits are counted, but not recorded.
_WORTH_A_RECORD_SECONDS = 1e-5
#: Transfers, and stalls, of which the latest records are kept.
_KEPT_RECORDS = 65536


class Direction(StrEnum):
    """The direction of a transfer, as seen from the training process."""

    READ = "read"
    WRITE = "write"


class MoveRecord(NamedTuple):
    """One finished transfer between a path and memory (one on each path for a striped ticket).

    The client is one of `CLIENTS`; times are of `time.perf_counter`, in seconds.
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
    """A span in which training waited for a client's transfers (`time.perf_counter`, seconds)."""

    client: str
    started_at: float
    finished_at: float


@dataclass(slots=True)
class UpdateRecord:
    """When one update ran (`time.perf_counter`), how long it waited for states, and its I/O."""

    begin: float
    end: float = 0.0
    waited: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(slots=True)
class _BusyClock:
    """Seconds in which at least one transfer was in flight."""

    _active: int = 0
    _since: float = 0.0
    _total: float = 0.0

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
    """Thread-safe sums over all transfers of one engine, and records of the latest.

    The package's clock is `timeit.default_timer`: `time.perf_counter` as it was when torch was
    imported. A test that replaces `time.perf_counter` meanwhile must not end our threads.
    """

    def __init__(self) -> None:
        self.moves: deque[MoveRecord] = deque(maxlen=_KEPT_RECORDS)
        self.stalls: deque[StallRecord] = deque(maxlen=_KEPT_RECORDS)
        self.updates: deque[UpdateRecord] = deque(maxlen=4096)
        #: Seconds of all updates so far, waiting included.
        self.update_seconds = 0.0
        self._lock = threading.Lock()
        #: Bytes so far: "written", "read" or "forwarded" for a client, and by tier.
        self.client_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.tier_bytes: dict[tuple[str, Direction], int] = defaultdict(int)
        #: Seconds for which training waited for a client (for reads, for memory), and for reads.
        self.stall_seconds: dict[str, float] = defaultdict(float)
        self.read_stall_seconds: dict[str, float] = defaultdict(float)
        #: Total queueing time of a tier's finished transfers.
        self.queue_seconds: dict[str, float] = defaultdict(float)
        self._busy: dict[tuple[str, Direction], _BusyClock] = defaultdict(_BusyClock)
        self._any_busy = _BusyClock()

    def move_started(self, tier: str, direction: Direction) -> float:
        """Record the start of a transfer; return the time."""
        now = perf_counter()
        with self._lock:
            self._busy[tier, direction].enter(now)
            self._any_busy.enter(now)
        return now

    def move_finished(self, record: MoveRecord, *, completed: bool) -> None:
        """Record the end of a transfer; its bytes count only if it `completed`."""
        with self._lock:
            self._busy[record.tier, record.direction].leave(record.finished_at)
            self._any_busy.leave(record.finished_at)
            if completed:
                self.moves.append(record)
                verb = "written" if record.direction is Direction.WRITE else "read"
                self.client_bytes[record.client, verb] += record.nbytes
                self.tier_bytes[record.tier, record.direction] += record.nbytes
                self.queue_seconds[record.tier] += record.started_at - record.queued_at

    def forwarded(self, client: str, nbytes: int) -> None:
        """Count bytes that were returned from memory because their write had not ended."""
        with self._lock:
            self.client_bytes[client, "forwarded"] += nbytes

    def stalled(self, client: str, since: float, *, reading: bool = False) -> None:
        """Count the time since `since` as a stall, for a read (`reading`) or for memory."""
        now = perf_counter()
        with self._lock:
            self.stall_seconds[client] += now - since
            if reading:
                self.read_stall_seconds[client] += now - since
            if now - since > _WORTH_A_RECORD_SECONDS:
                self.stalls.append(StallRecord(client, since, now))

    def updated(self, record: UpdateRecord) -> None:
        """Record an update that ends now."""
        record.end = perf_counter()
        with self._lock:
            self.updates.append(record)
            self.update_seconds += record.end - record.begin

    def bandwidth_GBps(self, tier: str, direction: Direction) -> float:
        """Return GB/s while the path was busy in that direction; 0 if never."""
        with self._lock:
            seconds = self._busy[tier, direction].seconds(perf_counter())
            return self.tier_bytes[tier, direction] / seconds / 1e9 if seconds > 0 else 0.0

    def busy_seconds(self) -> float:
        """Return the seconds in which any transfer was in flight."""
        with self._lock:
            return self._any_busy.seconds(perf_counter())

    def hidden_share(self) -> float:
        """Return the share of transfer time without stalls, 0 to 1 (1 without transfers)."""
        busy = self.busy_seconds()
        stalled = sum(tuple(self.stall_seconds.values()))
        return 1.0 if busy <= 0 else min(1.0, max(0.0, 1.0 - stalled / busy))
