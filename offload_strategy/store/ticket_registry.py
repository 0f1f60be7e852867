"""The registry of all tickets and how they are freed, and allocation of host buffers for them.

[Note: locks]
One lock guards the states of all entries. Queues call the store at the end of a transfer, so the
store never calls a queue while it holds the lock. Garbage collection may drop tickets at any point
of the program, so dropping only appends to a deque; the next operation, or the next end of a
transfer, frees the dropped tickets.

Ctrl-C cannot leave a plain lock in a plain `with` locked. It can leave a condition locked: its
`__enter__` is Python code that a KeyboardInterrupt may end after it took the lock. So waits poll.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from timeit import default_timer as perf_counter

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.moves import Move
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.ticket import Entry, Ticket, TicketState
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection
from offload_strategy.units import format_size

#: Another write may end before the one that is waited for.
_PAUSE_SECONDS = 0.001


class TicketRegistry:
    """All tickets of a store that are not freed. `lock` guards every entry."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.closed = False
        #: Transfers in flight, and bytes to be written, in total and by client.
        self.moving: set[Move] = set()
        self.writing_bytes = 0
        self.writing_bytes_of: Counter[str] = Counter()
        #: How often bytes left memory, or a load failed, without a call of their owner.
        self.lost_copies = 0
        self._dropped: deque[weakref.ref[Ticket]] = deque()
        self._tickets: dict[weakref.ref[Ticket], Entry] = {}
        # Entries with a copy in memory and on their paths, in the order of loading.
        self._copies: dict[Entry, None] = {}
        # Memory of tickets that were written; see `release_written`.
        self._written_payloads: deque[torch.Tensor] = deque()

    @property
    def live(self) -> int:
        """Tickets that are not freed."""
        self.free_dropped()
        return len(self._tickets)

    def ticket(self, entry: Entry) -> Ticket:
        """Return the ticket of an entry, which is freed when the ticket is dropped."""
        ticket = Ticket(entry)
        # See [Note: no Python code in finalizers].
        entry.reference = weakref.ref(ticket, self._dropped.append)
        self._tickets[entry.reference] = entry
        return ticket

    # ------------------------------------------------------------------ with the lock held
    def written(self, entry: Entry) -> None:
        """Mark an entry as written; the next `release_written` frees its memory."""
        self.lost_copies += 1
        if entry.payload is not None:
            self._written_payloads.append(entry.payload)
        self.stored(entry)

    def stored(self, entry: Entry) -> None:
        """Mark an entry as stored on paths and not in memory."""
        entry.state = TicketState.STORED
        entry.payload = None
        self._copies.pop(entry, None)

    def loaded(self, entry: Entry, payload: torch.Tensor) -> None:
        """Mark an entry as in memory and on paths."""
        entry.state, entry.payload = TicketState.IN_MEMORY, payload
        self._copies[entry] = None

    def drop_copy(self) -> bool:
        """Free the host copy that is needed last, as far as known; False if there is none."""
        # Loads start in the order of use: of those without a next use, the latest is needed last.
        copies = [entry for entry in reversed(self._copies) if entry.is_in_host_memory]
        if not copies:
            return False
        self.lost_copies += 1
        self.stored(max(copies, key=lambda e: float("-inf") if e.next_use is None else e.next_use))
        return True

    # ------------------------------------------------------------------ checks
    def check_alive(self, entry: Entry) -> None:
        """Raise OffloadError if the bytes of an entry are gone."""
        self.check_process()
        if entry.state is TicketState.FREED:
            raise OffloadError(
                f"{format_size(entry.nbytes)} of {entry.client} were freed before they were read"
            )
        if self.closed and entry.payload is None:
            raise OffloadError(
                f"{format_size(entry.nbytes)} of {entry.client} are gone: the offload engine was "
                f"closed. Close it after the last backward and after state_dict()."
            )

    def check_process(self) -> None:
        """Raise OffloadError in a forked child, which has no threads and buffers of its parent."""
        if os.getpid() != self.pid:
            raise OffloadError(
                "a forked process cannot use its parent's offload engine. Make an engine in the "
                "process that trains."
            )

    # ------------------------------------------------------------------ freeing
    def free(self, entry: Entry) -> None:
        """Free an entry in any state."""
        with UninterruptedSection():
            with self.lock:
                move = self._mark_freed(entry)
                # Without its weak reference, dropping the ticket has no effect.
                if entry.reference is not None:
                    self._tickets.pop(entry.reference, None)
                    entry.reference = None
            if move is not None:
                move.cancel()

    def pause(self) -> None:
        """Let writes end: wait for one of them, for a millisecond at most."""
        with self.lock:
            moving = list(self.moving)
        write = next((move for move in moving if move.direction is Direction.WRITE), None)
        if write is None:
            time.sleep(_PAUSE_SECONDS)
        else:
            if len(moving) == 1:
                write.run_queued()
            write.ended.wait(_PAUSE_SECONDS)
        self.release_written()

    def release_written(self) -> None:
        """Free the memory of written tickets: I/O threads would take the time of computations."""
        self._written_payloads.clear()

    def free_dropped(self) -> None:
        """Free the entries of dropped tickets if the lock is free; otherwise its holder will."""
        if not self._dropped:
            return
        with UninterruptedSection():
            while self._dropped and self.lock.acquire(blocking=False):
                moves: list[Move | None] = []
                try:
                    while self._dropped:
                        if entry := self._tickets.pop(self._dropped.popleft(), None):
                            moves.append(self._mark_freed(entry))
                finally:
                    self.lock.release()
                for move in filter(None, moves):
                    move.cancel()

    def forget(self, entry: Entry) -> None:
        """Release the space of a freed entry without a transfer in flight; with the lock held."""
        if entry.tier is not None:
            entry.tier.release(entry)

    def _mark_freed(self, entry: Entry) -> Move | None:
        """Mark an entry as freed; return the transfer that must be cancelled first, or None."""
        if entry.state is TicketState.FREED:
            return None
        entry.state = TicketState.FREED
        entry.payload = entry.staged = None
        self._copies.pop(entry, None)
        if entry.move is not None:  # the end of the transfer releases it
            return entry.move if os.getpid() == self.pid else None
        self.forget(entry)
        return None


@dataclass(eq=False)
class StorePart:
    """What reads or writes tickets; allocates host buffers, if necessary by dropping copies."""

    pool: BufferPool
    registry: TicketRegistry
    #: Copies of devices, which keep buffers until they are over.
    copies: CopyEngines
    recorder: Recorder

    def allocate_now(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer at once, within the budget if possible."""
        buffer = self._reclaimed(nbytes, pinned=pinned)
        if buffer is None:
            buffer = self.pool.acquire(nbytes, pinned=pinned, beyond_budget=True)
            assert buffer is not None
        return buffer

    def allocate_waiting(self, client: str, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer once writes or copies free one; without any, exceed the budget."""
        begin = perf_counter()
        while (buffer := self._reclaimed(nbytes, pinned=pinned)) is None:
            if pinned and any([engine.wait_for_oldest() for engine in tuple(self.copies.values())]):
                continue
            if not self.registry.writing_bytes:
                break
            self.registry.pause()
        self.recorder.stalled(client, begin)
        return self.allocate_now(nbytes, pinned=pinned) if buffer is None else buffer

    def _reclaimed(self, nbytes: int, *, pinned: bool) -> torch.Tensor | None:
        self.registry.release_written()
        while (buffer := self.pool.acquire(nbytes, pinned=pinned)) is None:
            with self.registry.lock:
                if not self.registry.drop_copy():
                    return None
        return buffer
