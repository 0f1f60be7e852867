"""The heap: puts tensors on tiers, brings them back, and forgets them.

[Note: locks]
One lock guards the states of all entries; none is held while bytes move. Queues call back into the
heap when a move ends, so the heap never calls a queue while it holds its lock. Tickets may be
dropped by a garbage collection in the middle of anything, so dropping only appends to a deque; the
next operation, or the next end of a move, reaps it.

A plain lock in a plain `with` cannot be left locked by Ctrl-C. A condition can: its `__enter__` is
Python code, which a KeyboardInterrupt may end after it took the lock. So waits poll.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from offload_strategy.errors import OffloadError, StorageError, TierFullError
from offload_strategy.heap.outgoing import OutgoingCopies
from offload_strategy.heap.ticket import Entry, Ticket, TicketState
from offload_strategy.heap.tiers import HostTier, PathTier, Tier
from offload_strategy.memory import BufferPool
from offload_strategy.telemetry import Direction, Recorder, get_logger
from offload_strategy.transfer import (
    DeviceCopier,
    Move,
    MoveState,
    Priority,
    UninterruptedSection,
)
from offload_strategy.units import format_size

logger = get_logger(__name__)

#: After this long a wait for a path is reported; training goes on waiting.
_REPORT_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.001
_CPU = torch.device("cpu")


class Heap:
    """Immutable tickets over tiers.

    Args:
        pool: lends the buffers that reads fill.
        recorder: counts forwarded bytes and stalls.
        write_behind: bytes that may wait to be written; a `put` beyond that waits (back-pressure).
    """

    def __init__(self, pool: BufferPool, recorder: Recorder, write_behind: int) -> None:
        self._pool = pool
        self._recorder = recorder
        self._write_behind = write_behind
        self._writing_bytes = 0
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._lock = threading.Lock()
        self._outgoing = OutgoingCopies()
        self._dropped: deque[weakref.ref[Ticket]] = deque()
        self._tickets: dict[int, tuple[weakref.ref[Ticket], Entry]] = {}
        self._moving: set[Entry] = set()
        self._live = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()

    # ------------------------------------------------------------------ public
    @property
    def live_tickets(self) -> int:
        """Tickets that are not freed."""
        self._reap()
        with self._lock:
            return self._live

    def put(self, payload: torch.Tensor, client: str, tiers: Sequence[Tier]) -> Ticket:
        """Give bytes to the heap: they stay in the first tier if it has room, else they leave.

        Args:
            payload: flat contiguous uint8 tensor on any device. It must not change any more.
            client: whose it is, for metrics.
            tiers: where it may go, in order of preference.

        Raises:
            TierFullError: no tier has room.
            StorageError: an earlier write failed.
        """
        self._check_usable()
        self._outgoing.let_go()
        self._reap()
        nbytes = payload.numel()
        if not any(isinstance(tier, HostTier) and tier.has_room(nbytes) for tier in tiers):
            self._await_room_to_write(client, nbytes)
        with UninterruptedSection():
            entry = self._place(payload, client, tiers)
            ticket = Ticket(entry)
            # See [Note: no Python code in finalizers].
            reference = weakref.ref(ticket, self._dropped.append)
            self._tickets[id(reference)] = (reference, entry)
            if entry.move is not None and isinstance(entry.tier, PathTier):
                entry.tier.queue.submit(entry.move)
        return ticket

    def prefetch(self, ticket: Ticket) -> bool:
        """Begin to load a stored ticket, if a buffer is to be had within the budget.

        Returns:
            False if nothing was done for want of memory; True if it is, or will be, in memory.
        """
        begun = self._load(ticket.entry, Priority.PREFETCH)
        return begun is not None or ticket.state is not TicketState.STORED

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The ticket's bytes, as a flat uint8 tensor on the device that they came from.

        The tensor is shared and must not be changed. Waits for a load if there must be one.

        Raises:
            StorageError: the bytes could not be read.
        """
        entry = ticket.entry
        while True:
            with self._lock:
                self._check_alive(entry)
                state, move = entry.state, entry.move
                payload = entry.payload if entry.source is None else entry.source
            if payload is not None and state is not TicketState.LOADING:
                if state is TicketState.WRITING:
                    self._recorder.forwarded(entry.client, entry.nbytes)
                return self._on_device(entry, payload)
            if state is not TicketState.LOADING:
                move = self._load(entry, Priority.NEEDED_NOW)
            # A load that ends before it is looked at must be looked at all the same: it may have
            # failed.
            if move is not None:
                self._await_load(entry, move)

    def evict(self, ticket: Ticket) -> None:
        """Drop the copy in memory of a ticket that is stored on a path."""
        entry = ticket.entry
        with self._lock:
            if entry.state is TicketState.IN_MEMORY and entry.extent is not None:
                entry.payload = None
                entry.state = TicketState.STORED

    def private(self, ticket: Ticket) -> torch.Tensor:
        """A copy of the bytes that the caller may change; the ticket stays as it is.

        What was loaded from a path is handed over as it is, without another copy.
        """
        shared = self.get(ticket)
        entry = ticket.entry
        with self._lock:
            if (
                entry.state is TicketState.IN_MEMORY
                and entry.extent is not None
                and entry.payload is shared
            ):
                entry.payload = None
                entry.state = TicketState.STORED
                return shared
        return self.borrow(entry.client, entry.nbytes, entry.device).copy_(shared)

    def take(self, ticket: Ticket) -> torch.Tensor:
        """The bytes, for the caller to change; frees the ticket. Avoids every copy that it can."""
        payload = self.writable(ticket)
        self.free(ticket)
        return payload

    def writable(self, ticket: Ticket) -> torch.Tensor:
        """As `take`, but frees nothing: whoever changes the bytes must free the ticket before."""
        entry = ticket.entry
        with self._lock:
            self._check_alive(entry)
            writing = entry.move if entry.state is TicketState.WRITING else None
        if writing is not None:
            # Nobody will read what is being written: stop, and use the bytes in memory.
            assert isinstance(entry.tier, PathTier)
            entry.tier.queue.cancel(writing)
            self._wait(writing, entry)
        return self.get(ticket)

    def borrow(self, client: str, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """A flat uint8 tensor with undefined contents, to be filled and then `put`.

        On the host it is a page-aligned buffer, which leaves without a copy. When the budget is
        used up, this waits for writes to give buffers back; when none is under way, waiting would
        be for ever, and the buffer goes beyond the budget.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._host_buffer(client, nbytes, pinned=False)

    def _host_buffer(self, client: str, nbytes: int, *, pinned: bool) -> torch.Tensor:
        begin = time.perf_counter()
        while (buffer := self._pool.lend(nbytes, pinned=pinned)) is None:
            if not self._writing_bytes:
                break
            time.sleep(_POLL_SECONDS)
        self._recorder.stalled(client, time.perf_counter() - begin)
        if buffer is None:
            buffer = self._pool.lend(nbytes, pinned=pinned, beyond_budget=True)
            assert buffer is not None
        return buffer

    def free(self, ticket: Ticket) -> None:
        """Forget a ticket, in whatever state it is."""
        self._free(ticket.entry)

    def wait_for_writes(self) -> None:
        """Wait until nothing is being written any more.

        Raises:
            StorageError: a write failed.
        """
        while self._writing_bytes and not self._closed:
            time.sleep(_POLL_SECONDS)
        self._check_usable()

    def close(self) -> None:
        """Give up every move; nothing can be put or read any more. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            moving = [(entry, entry.move) for entry in self._moving]
        # All of them first: each block that ends would let the next queued move begin.
        for entry, move in moving:
            if move is not None:
                self._cancel(entry, move)
        for entry, move in moving:
            if move is not None:
                self._wait(move, entry)
        self._outgoing.wait()

    # ------------------------------------------------------------------ placement
    def _place(self, payload: torch.Tensor, client: str, tiers: Sequence[Tier]) -> Entry:
        nbytes = payload.numel()
        for tier in tiers:
            if isinstance(tier, HostTier):
                with self._lock:
                    if not tier.claim(nbytes):
                        continue
                    self._live += 1
                entry = Entry(client, nbytes, payload.device, tier)
                try:
                    self._to_host(entry, payload)
                except BaseException:
                    self._free(entry)
                    raise
                return entry
            with self._lock:
                extent = tier.claim(nbytes)
            if extent is None:
                continue
            entry = Entry(client, nbytes, payload.device, tier)
            entry.extent = extent
            entry.state = TicketState.WRITING
            try:
                host, before = self._to_host(entry, payload)
            except BaseException:  # no memory left to pin, for instance
                with self._lock:
                    self._release_extent(entry)
                raise
            entry.move = Move(
                client=client,
                direction=Direction.WRITE,
                extent=extent,
                address=host.data_ptr(),
                nbytes=nbytes,
                priority=Priority.WRITE_BACK,
                keep_alive=host,
                before=before,
                on_end=partial(self._write_ended, entry),
            )
            with self._lock:
                self._live += 1
                self._writing_bytes += nbytes
                self._moving.add(entry)
            return entry
        usage = ", ".join(
            f"{tier.name}: {format_size(tier.used_bytes)} of {format_size(tier.capacity)} used"
            for tier in tiers
        )
        raise TierFullError(
            f"no tier has room for {format_size(nbytes)} of {client} ({usage}). Raise a tier's "
            f"capacity, add a tier, or offload less (activations.budget, a smaller batch)."
        )

    def _to_host(
        self, entry: Entry, payload: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Give an entry its bytes in host memory; also what a write must wait for before it."""
        if payload.device.type == "cpu":
            entry.payload = payload
            return payload, None
        pinned = payload.device.type == "cuda"
        host = self._host_buffer(entry.client, entry.nbytes, pinned=pinned)
        event = self._copier(payload.device).copy_out(payload, host)
        entry.payload = host
        if event is None:
            return host, None
        entry.source = payload
        self._outgoing.add(event, entry)

        def before() -> None:
            event.synchronize()
            self._outgoing.let_go()

        return host, before

    def _await_room_to_write(self, client: str, nbytes: int) -> None:
        begin = time.perf_counter()
        report_at = begin + _REPORT_WAIT_SECONDS
        while self._writing_bytes and self._writing_bytes + nbytes > self._write_behind:
            time.sleep(_POLL_SECONDS)
            if time.perf_counter() > report_at:
                report_at += _REPORT_WAIT_SECONDS
                logger.warning(
                    "%s have been waiting to be written for %.0f s; training resumes when the "
                    "disk takes them",
                    format_size(self._writing_bytes),
                    time.perf_counter() - begin,
                )
        self._recorder.stalled(client, time.perf_counter() - begin)

    # ------------------------------------------------------------------ loading
    def _load(self, entry: Entry, priority: Priority) -> Move | None:
        """Begin to load a stored entry; None if it is not stored, or there is no memory."""
        self._reap()
        with self._lock:
            self._check_alive(entry)
            if entry.state is not TicketState.STORED:
                return None
        host = self._pool.lend(
            entry.nbytes,
            pinned=entry.device.type == "cuda",
            beyond_budget=priority is Priority.NEEDED_NOW,
        )
        if host is None:
            return None
        tier, extent = entry.tier, entry.extent
        assert isinstance(tier, PathTier)
        assert extent is not None
        move = Move(
            client=entry.client,
            direction=Direction.READ,
            extent=extent,
            address=host.data_ptr(),
            nbytes=entry.nbytes,
            priority=priority,
            keep_alive=host,
            on_end=lambda move: self._read_ended(entry, move, host),
        )
        with UninterruptedSection():
            with self._lock:
                if entry.state is not TicketState.STORED:
                    return None
                entry.state = TicketState.LOADING
                entry.move = move
                self._moving.add(entry)
            tier.queue.submit(move)
        return move

    def _await_load(self, entry: Entry, move: Move) -> None:
        begin = time.perf_counter()
        assert isinstance(entry.tier, PathTier)
        entry.tier.queue.hurry(move)
        self._wait(move, entry)
        self._recorder.stalled(entry.client, time.perf_counter() - begin)
        if move.state is MoveState.FAILED:
            raise self._explain(entry, move, "read")

    def _wait(self, move: Move, entry: Entry) -> None:
        begin = time.perf_counter()
        patience = _REPORT_WAIT_SECONDS
        while not move.ended.wait(patience):
            assert isinstance(entry.tier, PathTier)
            logger.warning(
                "waiting for %s to %s %s for %.0f s; the path does not answer, training resumes "
                "when it does",
                entry.tier.space.path,
                move.direction.value,
                format_size(entry.nbytes),
                time.perf_counter() - begin,
            )
            patience *= 2

    def _on_device(self, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        if entry.device.type == "cpu":
            return payload
        copier = self._copier(entry.device)
        if payload.device.type == "cpu":
            payload = copier.copy_in(payload)
        copier.adopt(payload)
        return payload

    def _copier(self, device: torch.device) -> DeviceCopier:
        copier = self._copiers.get(device)
        if copier is None:
            copier = self._copiers[device] = DeviceCopier(device)
        return copier

    # ------------------------------------------------------------------ ends of moves
    def _write_ended(self, entry: Entry, move: Move) -> None:
        with self._lock:
            self._writing_bytes -= entry.nbytes
            self._moving.discard(entry)
            entry.move = None
            if entry.state is TicketState.FREED:
                self._forget(entry)
            elif move.state is MoveState.DONE:
                entry.state = TicketState.STORED
                entry.payload = None
            else:
                entry.state = TicketState.IN_MEMORY
                self._release_extent(entry)
                if move.state is MoveState.FAILED:
                    entry.error = move.error
                    self._failure = self._failure or self._explain(entry, move, "write")
        self._reap()

    def _read_ended(self, entry: Entry, move: Move, host: torch.Tensor) -> None:
        payload = host
        if move.state is MoveState.DONE and entry.device.type != "cpu":
            try:
                payload = self._copier(entry.device).copy_in(host)
            except BaseException as error:
                move.state, move.error = MoveState.FAILED, error
        with self._lock:
            self._moving.discard(entry)
            entry.move = None
            if entry.state is TicketState.FREED:
                self._forget(entry)
            elif move.state is MoveState.DONE:
                entry.state = TicketState.IN_MEMORY
                entry.payload = payload
            else:
                entry.state = TicketState.STORED
        self._reap()

    def _explain(self, entry: Entry, move: Move, verb: str) -> StorageError:
        assert isinstance(entry.tier, PathTier)
        error = StorageError(
            f"tier {entry.tier.name!r}: could not {verb} {format_size(entry.nbytes)} of "
            f"{entry.client} at {entry.tier.space.path}: {move.error}. Check the disk and the "
            f"system's log; training cannot go on with this path."
        )
        error.__cause__ = move.error
        return error

    # ------------------------------------------------------------------ freeing
    def _reap(self) -> None:
        """Free the entries of tickets that died, if the lock is free; else its holder will."""
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                doomed = [self._mark_freed(entry) for entry in self._take_dropped()]
            finally:
                self._lock.release()
            for entry, move in filter(None, doomed):
                self._cancel(entry, move)

    def _take_dropped(self) -> Iterator[Entry]:
        while self._dropped:
            _, entry = self._tickets.pop(id(self._dropped.popleft()))
            yield entry

    def _free(self, entry: Entry) -> None:
        self._reap()
        with self._lock:
            doomed = self._mark_freed(entry)
        if doomed is not None:
            self._cancel(*doomed)

    def _mark_freed(self, entry: Entry) -> tuple[Entry, Move] | None:
        """Freed from now on; returns the move that must be cancelled first, if there is one."""
        if entry.state is TicketState.FREED:
            return None
        moving = entry.move
        entry.state = TicketState.FREED
        entry.payload = None
        self._live -= 1
        if moving is not None:
            return entry, moving  # the end of the move forgets it
        self._forget(entry)
        return None

    def _cancel(self, entry: Entry, move: Move) -> None:
        if os.getpid() == self._pid and isinstance(entry.tier, PathTier):
            entry.tier.queue.cancel(move)

    def _forget(self, entry: Entry) -> None:
        self._release_extent(entry)
        if isinstance(entry.tier, HostTier):
            entry.tier.release(entry.nbytes)

    def _release_extent(self, entry: Entry) -> None:
        if entry.extent is not None and isinstance(entry.tier, PathTier):
            entry.tier.space.free(entry.extent)
            entry.extent = None

    # ------------------------------------------------------------------ checks
    def _check_alive(self, entry: Entry) -> None:
        self._check_process()
        if entry.state is TicketState.FREED:
            raise OffloadError(
                f"{format_size(entry.nbytes)} of {entry.client} were freed before they were read"
            )
        if self._closed and entry.payload is None:
            raise OffloadError(
                f"{format_size(entry.nbytes)} of {entry.client} are gone: the offload engine was "
                f"closed. Close it after the last backward and after state_dict()."
            )

    def _check_usable(self) -> None:
        if self._closed:
            raise OffloadError("the offload engine is closed")
        self._check_process()
        if self._failure is not None:
            # A new one each time: a kept exception collects the frames, and tensors, of all who
            # were told.
            raise StorageError(*self._failure.args) from self._failure.__cause__

    def _check_process(self) -> None:
        # Neither the threads nor the buffers of a parent exist in its forked children.
        if os.getpid() != self._pid:
            raise OffloadError(
                "a forked process cannot use its parent's offload engine. Make an engine in the "
                "process that trains."
            )
