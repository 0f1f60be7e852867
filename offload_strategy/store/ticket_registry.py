"""The ledger: which tickets there are, and how they die.

[Note: locks]
One lock guards the states of all entries; none is held while bytes move. Queues call back into the
store when a move ends, so the store never calls a queue while it holds the lock. Tickets may be
dropped by a garbage collection in the middle of anything, so dropping only appends to a deque; the
next operation, or the next end of a move, reaps it.

A plain lock in a plain `with` cannot be left locked by Ctrl-C. A condition can: its `__enter__` is
Python code, which a KeyboardInterrupt may end after it took the lock. So waits poll.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.queues.moves import Move
from offload_strategy.store.ticket import Entry, Ticket, TicketState
from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection
from offload_strategy.units import format_size


class TicketRegistry:
    """All tickets of a store that are alive. `lock` guards every entry."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self.closed = False
        #: Entries whose bytes are on their way, and how many bytes of them are to be written,
        #: in all and for each client.
        self.moving: set[Entry] = set()
        self.writing_bytes = 0
        self.writing_bytes_of: Counter[str] = Counter()
        self._live = 0
        self._dropped: deque[weakref.ref[Ticket]] = deque()
        self._tickets: dict[int, tuple[weakref.ref[Ticket], Entry]] = {}
        # Entries with a copy in memory besides the one on their paths, in the order of loading.
        self._copies: dict[Entry, None] = {}
        # Memory of what was written; see `let_go`.
        self._written_payloads: deque[torch.Tensor] = deque()

    @property
    def live(self) -> int:
        """Tickets that are not freed."""
        self.free_dropped()
        with self.lock:
            return self._live

    def ticket(self, entry: Entry) -> Ticket:
        """The owner's side of a counted entry; the entry is freed when it dies."""
        ticket = Ticket(entry)
        # See [Note: no Python code in finalizers].
        reference = weakref.ref(ticket, self._dropped.append)
        self._tickets[id(reference)] = (reference, entry)
        entry.reference = id(reference)
        return ticket

    # ------------------------------------------------------------------ with the lock held
    def written(self, entry: Entry) -> None:
        """The bytes are on the paths; their memory goes with the next `let_go`."""
        if entry.payload is not None:
            self._written_payloads.append(entry.payload)
        self.stored(entry)

    def count(self) -> None:
        """One more entry is alive."""
        self._live += 1

    def stored(self, entry: Entry) -> None:
        """The bytes are on the paths, and no longer in memory."""
        entry.state = TicketState.STORED
        entry.payload = None
        self._copies.pop(entry, None)

    def loaded(self, entry: Entry) -> None:
        """The bytes are in memory as well."""
        entry.state = TicketState.IN_MEMORY
        self._copies[entry] = None

    def is_copy(self, entry: Entry) -> bool:
        """Whether the bytes in memory may be dropped, since they are on paths, too."""
        return entry.state is TicketState.IN_MEMORY and bool(entry.stripes)

    def drop_copy(self) -> bool:
        """Drop the copy that is needed last, as far as is known; False if there is none."""
        if not self._copies:
            return False
        # Loads are issued in the order of use: of those without a time, the latest is needed last.
        latest = max(
            reversed(self._copies),
            key=lambda entry: float("-inf") if entry.next_use is None else entry.next_use,
        )
        self.stored(latest)
        return True

    # ------------------------------------------------------------------ checks
    def check_alive(self, entry: Entry) -> None:
        """Raise if the bytes of an entry are gone."""
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
        """Raise in a forked child: neither its parent's threads nor its buffers exist there."""
        if os.getpid() != self.pid:
            raise OffloadError(
                "a forked process cannot use its parent's offload engine. Make an engine in the "
                "process that trains."
            )

    # ------------------------------------------------------------------ dying
    def free(self, entry: Entry) -> None:
        """Forget an entry, in whatever state it is."""
        with UninterruptedSection():
            with self.lock:
                move = self._mark_freed(entry)
                # Without its weak reference the ticket's death is no news.
                self._tickets.pop(entry.reference, None)
                entry.reference = 0  # that number is another's from now on
            if move is not None:
                self._cancel(move)

    def release_written(self) -> None:
        """Give up the memory of what was written.

        To unmap it takes time, which I/O threads would take from a computation on all cores: so
        those who give and ask do it, between two operations, as they would without offload.
        """
        while self._written_payloads:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self._written_payloads.popleft()

    def free_dropped(self) -> None:
        """Free the entries of tickets that died, if the lock is free; else its holder will."""
        if not self._dropped:
            return
        with UninterruptedSection():
            while self._dropped and self.lock.acquire(blocking=False):
                try:
                    doomed = [self._mark_freed(entry) for entry in self._take_dropped()]
                finally:
                    self.lock.release()
                for move in filter(None, doomed):
                    self._cancel(move)

    def forget(self, entry: Entry) -> None:
        """Give back what a freed entry, with nothing under way, holds; with the lock held."""
        self.release_stripes(entry)
        if entry.tier is not None:
            entry.tier.release(entry.nbytes)

    def release_stripes(self, entry: Entry) -> None:
        """Give its extents back; with the lock held."""
        stripes, entry.stripes = entry.stripes, ()
        if stripes and entry.tier is not None:
            entry.tier.release_extents(stripes)

    def _take_dropped(self) -> Iterator[Entry]:
        while self._dropped:
            known = self._tickets.pop(id(self._dropped.popleft()), None)
            if known is not None:
                yield known[1]

    def _mark_freed(self, entry: Entry) -> Move | None:
        """Freed from now on; returns the move that must be cancelled first, if there is one."""
        if entry.state is TicketState.FREED:
            return None
        entry.state = TicketState.FREED
        entry.payload = None
        self._copies.pop(entry, None)
        self._live -= 1
        if entry.move is not None:
            return entry.move  # the end of the move forgets it
        self.forget(entry)
        return None

    def _cancel(self, move: Move) -> None:
        if os.getpid() == self.pid:
            move.cancel()
