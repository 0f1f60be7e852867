"""The store: offloads tensors to tiers, loads them, and frees them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import Priority
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import error_messages as reports
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.reader import Reader
from offload_strategy.store.ticket import Entry, Ticket, TicketState, Tier
from offload_strategy.store.ticket_registry import POLL_SECONDS, BufferAllocator, TicketRegistry
from offload_strategy.store.tiers import HostTier
from offload_strategy.store.writer import Writer
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.torch_support.interrupts import UninterruptedSection

_CPU = torch.device("cpu")


class TensorStore:
    """Immutable tickets over tiers.

    Args:
        pool: Pool of host buffers.
        recorder: Counts forwarded bytes and stalls.
        write_behind: Bytes that may wait to be written; a `put` beyond that waits (back-pressure).
    """

    def __init__(self, pool: BufferPool, recorder: Recorder, write_behind: int) -> None:
        self.pool = pool
        #: Copies between devices and the host.
        self.copies = CopyEngines()
        self.recorder = recorder
        self._registry = TicketRegistry()
        self._allocator = BufferAllocator(pool, self._registry, self.copies, recorder)
        parts = (self._registry, self._allocator, self.copies, recorder)
        self._writer = Writer(*parts, write_behind)
        self._reader = Reader(*parts)

    @property
    def live_tickets(self) -> int:
        """Number of tickets that are not freed."""
        return self._registry.live

    @property
    def writing_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""
        return self._registry.writing_bytes

    def writing_bytes_of(self, client: str) -> int:
        """Return the bytes of one client that wait to be written or are being written."""
        return self._registry.writing_bytes_of[client]

    # ------------------------------------------------------------------ offloading
    def put(
        self,
        payload: torch.Tensor,
        client: str,
        tiers: Sequence[Tier],
        *,
        next_use: float | None = None,
        whole_pages: bool = False,
        one_block_at_a_time: bool = False,
        replaces: Ticket | None = None,
    ) -> Ticket:
        """Offload bytes to the first tier that has room.

        Args:
            payload: Flat contiguous uint8 tensor on any device. It must not change any more.
            client: Name of the client, for metrics.
            tiers: Tiers in order of preference.
            next_use: Time of the next read on a clock that all tickets of these tiers share. In a
                host tier, tickets with a later next use are evicted to make room. None: the ticket
                neither evicts others nor is evicted.
            whole_pages: Whether to write whole memory pages around the payload, if direct I/O
                would otherwise need a copy. `read_into` then needs a copy.
            one_block_at_a_time: See `Move`.
            replaces: A ticket of one of these tiers that is freed when the new one is current, or
                the other way round: if it is in host memory, the tier holds both until then.

        Raises TierFullError if no tier has room, StorageError if an earlier write failed.
        """
        self._check_usable()
        self._collect()
        self.pool.look()
        self._writer.await_room(client, payload.numel(), tiers)
        with UninterruptedSection():
            replaced = None if replaces is None else replaces.entry
            entry = self._writer.place(
                payload, client, tiers, next_use, whole_pages, one_block_at_a_time, replaced
            )
            ticket = self._registry.ticket(entry)
            self._writer.submit(entry)
        return ticket

    def adopt(
        self, queue: PathQueue, offset: int, nbytes: int, client: str, device: torch.device = _CPU
    ) -> Ticket:
        """Return a ticket for a range of an existing file, which is read when needed.

        `queue` is over an `ExternalFile`, which must stay open as long as its tickets; `get`
        returns the bytes on `device`. Raises StorageError if the file is too short.
        """
        self._check_usable()
        assert isinstance(queue.region, ExternalFile)
        extent, begin = queue.region.cover(offset, nbytes)
        entry = Entry(client, nbytes, device, None)
        if nbytes:
            entry.stripes = (Stripe(queue, extent, 0, begin + nbytes),)
            entry.begin = begin
            entry.state = TicketState.STORED
        else:
            entry.payload = torch.empty(0, dtype=torch.uint8, device=device)
        with UninterruptedSection(), self._registry.lock:
            self._registry.count()
            return self._registry.ticket(entry)

    def expect(self, ticket: Ticket, next_use: float) -> None:
        """Set the time of a ticket's next read; see `put`."""
        entry = ticket.entry
        with self._registry.lock:
            entry.next_use = next_use
            if entry.may_leave and isinstance(entry.tier, HostTier):
                entry.tier.note(entry)

    def borrow(self, client: str, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Return a flat uint8 tensor with undefined contents, to be filled and then `put`.

        On the host it is a page-aligned buffer, which is written without a copy. If the budget is
        used up, this waits for writes to free buffers, or exceeds it if none is in flight.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._allocator.allocate_waiting(client, nbytes, pinned=False)

    # ------------------------------------------------------------------ reading
    def prefetch(self, ticket: Ticket) -> bool:
        """Load a stored ticket if there is room; return whether it is or will be in memory."""
        self._registry.release_written()
        begun = self._reader.load(ticket.entry, Priority.PREFETCH)
        return begun is not None or ticket.state is not TicketState.STORED

    def stage(self, ticket: Ticket) -> None:
        """Start to copy a ticket's bytes to the device that they came from.

        Nothing happens if they are not in host memory, or did not come from an accelerator. The
        copy starts when the device has executed what this thread has launched so far.
        """
        if ticket.entry.device.type != "cpu":
            self._reader.stage(ticket.entry)

    def get(self, ticket: Ticket) -> torch.Tensor:
        """Return the ticket's bytes as a flat uint8 tensor on the device that they came from.

        The tensor is shared and must not be changed. Waits for a load if necessary. Raises
        StorageError if the bytes could not be read.
        """
        return self._get(ticket)[0]

    def _get(self, ticket: Ticket) -> tuple[torch.Tensor, bool]:
        """Return what `get` does, and whether the ticket shares it."""
        entry = ticket.entry
        self._collect()
        while True:
            payload, move = self._reader.payload_or_move(entry)
            if payload is not None:
                return self._reader.on_device(entry, payload)
            if move is None:
                move = self._reader.load(entry, Priority.NEEDED_NOW)
            # A load that has ended already must be awaited, too: it may have failed.
            if move is not None:
                self._reader.await_load(entry, move)

    def read_into(self, ticket: Ticket, out: torch.Tensor) -> None:
        """Read the ticket's bytes into the caller's tensor, directly if it is in host memory.

        `out` is a flat contiguous uint8 tensor of the ticket's size, on any device. Raises
        StorageError if the bytes could not be read; then the contents of `out` are undefined.
        """
        entry = ticket.entry
        if out.numel() != entry.nbytes or out.dtype != torch.uint8 or not out.is_contiguous():
            raise ValueError(
                f"read_into: out must be a contiguous uint8 tensor of {entry.nbytes} elements, "
                f"got {tuple(out.shape)} of {out.dtype}"
            )
        directly = out.device.type == "cpu" and entry.begin == 0
        while True:
            payload, move = self._reader.payload_or_move(entry)
            if payload is not None or not directly:
                out.copy_(self.get(ticket))
                return
            if move is not None:  # a load is in flight
                self._reader.await_load(entry, move)
                continue
            move = self._reader.load_into(entry, out)
            if move is not None:
                self._reader.await_load(entry, move)
                return

    def private(self, ticket: Ticket) -> torch.Tensor:
        """Return a copy of the bytes that the caller may change; the ticket does not change.

        Bytes that were loaded from a path are handed over without another copy.
        """
        payload, shared = self._get(ticket)
        if not shared:
            return payload
        entry = ticket.entry
        with self._registry.lock:
            if entry.is_copy and entry.payload is payload:
                self._registry.stored(entry)
                return payload
        return self.borrow(entry.client, entry.nbytes, entry.device).copy_(payload)

    def take(self, ticket: Ticket) -> torch.Tensor:
        """Free the ticket and return its bytes, which the caller may change; avoids copies."""
        payload = self.writable(ticket)
        self.free(ticket)
        return payload

    def writable(self, ticket: Ticket) -> torch.Tensor:
        """Return the bytes as `take` does; free the ticket before changing them."""
        entry = ticket.entry
        with self._registry.lock:
            self._registry.check_alive(entry)
            writing = entry.move if entry.state is TicketState.WRITING else None
        if writing is not None:
            # Nobody will read what is being written: cancel it, and use the bytes in memory.
            writing.cancel()
            self._reader.wait(entry, writing)
        return self.get(ticket)

    # ------------------------------------------------------------------ freeing
    def cancel_write(self, ticket: Ticket) -> None:
        """Cancel a write in flight, so that the bytes stay in memory; does not wait."""
        entry = ticket.entry
        with self._registry.lock:
            move = entry.move if entry.state is TicketState.WRITING else None
        if move is not None:
            move.cancel()

    def evict(self, ticket: Ticket) -> None:
        """Free the copy in memory of a ticket that is stored on a path."""
        entry = ticket.entry
        with self._registry.lock:
            if entry.is_copy:
                self._registry.stored(entry)

    def free(self, ticket: Ticket) -> None:
        """Free a ticket in any state."""
        self._registry.free(ticket.entry)

    def release_written(self) -> None:
        """Free the memory of tickets that were written."""
        self._registry.release_written()

    def trim(self) -> None:
        """Free idle buffers before a time in which little will be read."""
        self._collect()
        self.pool.trim()

    def pass_begins(self) -> None:
        """Free idle buffers that would raise the peak; see [Note: idle memory and peaks]."""
        self._collect()
        self.pool.pass_begins()

    def wait_for_writes(self) -> None:
        """Wait until all writes have ended; raise StorageError if one failed."""
        while self._registry.writing_bytes and not self._registry.closed:
            with self._registry.lock:
                moves = [entry.move for entry in self._registry.moving]
            for move in moves:
                if move is not None and move.direction is Direction.WRITE:
                    if len(moves) == 1:
                        move.run_queued()
                    move.ended.wait(10 * POLL_SECONDS)
        self._collect()
        self._check_usable()

    def await_writes(self, client: str, at_most: int, seconds: float, *, own: bool = False) -> None:
        """Wait until at most `at_most` bytes are to be written, or so many seconds.

        With `own` only bytes of the waiting client count.
        """
        self._writer.await_writes(client, at_most, seconds, own=own)

    def close(self) -> None:
        """Cancel every transfer; nothing can be offloaded or loaded any more. Idempotent."""
        registry = self._registry
        if os.getpid() != registry.pid:
            return
        with registry.lock:
            registry.closed = True
            moving = [(entry, entry.move) for entry in registry.moving]
        # Cancel all of them first: each block that ends would start the next queued transfer.
        for _, move in moving:
            if move is not None:
                move.cancel()
        for entry, move in moving:
            if move is not None:
                self._reader.wait(entry, move)
        registry.release_written()
        self.copies.close()

    def _collect(self) -> None:
        """Free what was dropped, written and copied, without waiting."""
        self._registry.release_written()
        self._registry.free_dropped()
        self.copies.collect()

    def _check_usable(self) -> None:
        if self._registry.closed:
            raise OffloadError("the offload engine is closed")
        self._registry.check_process()
        failure = self._writer.failure
        if failure is not None:
            raise reports.again(failure) from failure.__cause__
