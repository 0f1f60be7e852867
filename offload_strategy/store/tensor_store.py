"""The store: puts tensors on tiers, brings them back, and forgets them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import Priority
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import error_messages as reports
from offload_strategy.store.buffer_allocator import POLL_SECONDS, BufferAllocator
from offload_strategy.store.device_copies import DeviceCopies
from offload_strategy.store.reader import Reader
from offload_strategy.store.ticket import Entry, Ticket, TicketState, Tier
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.store.writer import Writer
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection

_CPU = torch.device("cpu")


class TensorStore:
    """Immutable tickets over tiers.

    Args:
        pool: lends the buffers that reads fill.
        recorder: counts forwarded bytes and stalls.
        write_behind: bytes that may wait to be written; a `put` beyond that waits (back-pressure).
    """

    def __init__(self, pool: BufferPool, recorder: Recorder, write_behind: int) -> None:
        self._recorder = recorder
        self._registry = TicketRegistry()
        self._copies = DeviceCopies()
        self._allocator = BufferAllocator(pool, self._registry, recorder)
        self._writer = Writer(self._registry, self._allocator, self._copies, recorder, write_behind)
        self._reader = Reader(self._registry, self._allocator, self._copies, recorder)
        self._plans: dict[int, Counter[int]] = {}

    @property
    def live_tickets(self) -> int:
        """Tickets that are not freed."""
        return self._registry.live

    @property
    def writing_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""
        return self._registry.writing_bytes

    def writing_bytes_of(self, client: str) -> int:
        """Those of one client."""
        return self._registry.writing_bytes_of[client]

    # ------------------------------------------------------------------ giving
    def put(
        self,
        payload: torch.Tensor,
        client: str,
        tiers: Sequence[Tier],
        *,
        next_use: float | None = None,
        whole_pages: bool = False,
        one_block_at_a_time: bool = False,
        instead_of: Ticket | None = None,
    ) -> Ticket:
        """Give bytes to the store: they stay in the first tier if it has room, else they leave.

        Args:
            payload: flat contiguous uint8 tensor on any device. It must not change any more.
            client: whose it is, for metrics.
            tiers: where it may go, in order of preference.
            next_use: when it will be read, on any clock that the tickets of these tiers share. In
                a host tier, what is needed later makes room for it. None: it neither makes others
                leave nor leaves for them.
            whole_pages: write the payload with what lies around it in its pages, where direct I/O
                would else need a copy. `read_into` then cannot do without one.
            one_block_at_a_time: while nobody waits for it, as threads that move bytes take cores
                from a host that computes.
            instead_of: a ticket of one of these tiers that will be freed, or this one in its place:
                what is in host memory stays there, and the tier holds both for that long.

        Raises:
            TierFullError: no tier has room.
            StorageError: an earlier write failed.
        """
        self._check_usable()
        self._copies.release_written()
        self._registry.release_written()
        self._registry.free_dropped()
        self._allocator.look()
        self._writer.await_room(client, payload.numel(), tiers)
        with UninterruptedSection():
            replaced = None if instead_of is None else instead_of.entry
            entry = self._writer.place(
                payload, client, tiers, next_use, whole_pages, one_block_at_a_time, replaced
            )
            move = entry.move
            ticket = self._registry.ticket(entry)
            if move is not None:
                move.submit()
        return ticket

    def adopt(
        self,
        queue: PathQueue,
        offset: int,
        nbytes: int,
        client: str,
        device: torch.device = _CPU,
    ) -> Ticket:
        """A ticket for a range of a foreign file, which is read when it is needed.

        Args:
            queue: over a `ExternalFile`, which must stay open as long as its tickets live.
            offset: where in the file the range begins, in bytes.
            nbytes: how long it is.
            client: whose it is, for metrics.
            device: where `get` returns the bytes.

        Raises:
            StorageError: the file does not reach that far.
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
        """Tell, or correct, when a ticket will be read; see `put`."""
        entry = ticket.entry
        with self._registry.lock:
            entry.next_use = next_use
            if entry.may_leave and entry.tier is not None:
                entry.tier.note(entry)

    def borrow(self, client: str, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """A flat uint8 tensor with undefined contents, to be filled and then `put`.

        On the host it is a page-aligned buffer, which leaves without a copy. When the budget is
        used up, this waits for writes to give buffers back; when none is under way, waiting would
        be for ever, and the buffer goes beyond the budget.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._allocator.allocate_waiting(client, nbytes, pinned=False)

    # ------------------------------------------------------------------ reading
    def prefetch(self, ticket: Ticket) -> bool:
        """Begin to load a stored ticket, if a buffer is to be had within the budget.

        Returns:
            False if nothing was done for want of memory; True if it is, or will be, in memory.
        """
        self._registry.release_written()
        begun = self._reader.load(ticket.entry, Priority.PREFETCH)
        return begun is not None or ticket.state is not TicketState.STORED

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The ticket's bytes, as a flat uint8 tensor on the device that they came from.

        The tensor is shared and must not be changed. Waits for a load if there must be one.

        Raises:
            StorageError: the bytes could not be read.
        """
        entry = ticket.entry
        self._registry.release_written()
        while True:
            payload, move = self._reader.payload_or_move(entry)
            if payload is not None:
                return self._reader.on_device(entry, payload)
            if move is None:
                move = self._reader.load(entry, Priority.NEEDED_NOW)
            # A load that ends before it is looked at must be looked at all the same: it may have
            # failed.
            if move is not None:
                self._reader.await_load(entry, move)

    def read_into(self, ticket: Ticket, out: torch.Tensor) -> None:
        """Fill the caller's memory with the ticket's bytes; host memory is read into directly.

        Args:
            ticket: to be read; it stays as it is.
            out: flat contiguous uint8 tensor of the ticket's size, on any device.

        Raises:
            StorageError: the bytes could not be read; then the contents of `out` are undefined.
            ValueError: `out` cannot take them.
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
            if move is not None:  # somebody else loads it
                self._reader.await_load(entry, move)
                continue
            move = self._reader.load_into(entry, out)
            if move is not None:
                self._reader.await_load(entry, move)
                return

    def private(self, ticket: Ticket) -> torch.Tensor:
        """A copy of the bytes that the caller may change; the ticket stays as it is.

        What was loaded from a path is handed over as it is, without another copy.
        """
        shared = self.get(ticket)
        entry = ticket.entry
        with self._registry.lock:
            if self._registry.is_copy(entry) and entry.payload is shared:
                self._registry.stored(entry)
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
        with self._registry.lock:
            self._registry.check_alive(entry)
            writing = entry.move if entry.state is TicketState.WRITING else None
        if writing is not None:
            # Nobody will read what is being written: stop, and use the bytes in memory.
            writing.cancel()
            self._reader.wait(entry, writing)
        return self.get(ticket)

    # ------------------------------------------------------------------ letting go
    def cancel_write(self, ticket: Ticket) -> None:
        """Stop a write that is not over: the bytes stay in memory instead. Waits for nothing."""
        entry = ticket.entry
        with self._registry.lock:
            move = entry.move if entry.state is TicketState.WRITING else None
        if move is not None:
            move.cancel()

    def evict(self, ticket: Ticket) -> None:
        """Drop the copy in memory of a ticket that is stored on a path."""
        entry = ticket.entry
        with self._registry.lock:
            if self._registry.is_copy(entry):
                self._registry.stored(entry)

    def free(self, ticket: Ticket) -> None:
        """Forget a ticket, in whatever state it is."""
        self._registry.free(ticket.entry)

    def plan(self, owner: object, sizes: Iterable[int], at_most: int) -> None:
        """Keep buffers of these sizes mapped from now on, even while nobody uses them.

        Args:
            owner: who will ask for them; what it said before is void.
            sizes: of each in bytes, the most important first; none to forget them.
            at_most: bytes of them and of what other owners have planned. Others are not kept.
        """
        self._plans.pop(id(owner), None)
        room = at_most - sum(
            size * count for plan in self._plans.values() for size, count in plan.items()
        )
        kept = self._plans[id(owner)] = Counter()
        for size in sizes:
            room -= size
            if room < 0:
                break
            kept[size] += 1
        self._allocator.plan(sum(self._plans.values(), Counter()))

    def release_written(self) -> None:
        """Give up the memory of what was written."""
        self._registry.release_written()

    def stalled_seconds(self, client: str) -> float:
        """For which a client has waited in all."""
        return self._recorder.stall_seconds(client)

    def keep_idle(self, nbytes: int) -> None:
        """Give idle buffers back beyond so many bytes, from now on."""
        self._allocator.keep_idle(nbytes)

    def keep_idle_beyond(self, nbytes: int) -> None:
        """Keep so many bytes of idle buffers on top of the usual ones, where memory is not scarce.

        For clients that give back at the end of a step what they ask for again in the next one.
        """
        self._allocator.keep_idle_beyond(nbytes)

    def idle_may_exceed(self, nbytes: int) -> None:
        """Idle buffers may make the process larger by so many bytes than it needs to be.

        For clients of which one request's buffer is the next one's; see [Note: idle memory and
        peaks].
        """
        self._allocator.idle_may_exceed(nbytes)

    def trim(self) -> None:
        """Give idle buffers back, for a while in which little will be read."""
        self._registry.release_written()
        self._allocator.trim()

    def pass_begins(self) -> None:
        """Give idle buffers back that would raise the peak of memory, until the next pass begins.

        See [Note: idle memory and peaks].
        """
        self._registry.release_written()
        self._allocator.pass_begins()

    def wait_for_writes(self) -> None:
        """Wait until nothing is being written any more.

        Raises:
            StorageError: a write failed.
        """
        while self._registry.writing_bytes and not self._registry.closed:
            with self._registry.lock:
                moves = [entry.move for entry in self._registry.moving]
            for move in moves:
                if move is not None and move.direction is Direction.WRITE:
                    if len(moves) == 1:
                        move.run_queued()
                    move.ended.wait(10 * POLL_SECONDS)
        self._registry.release_written()
        self._check_usable()

    def await_writes(self, client: str, at_most: int, seconds: float, *, own: bool = False) -> None:
        """Wait until no more than `at_most` bytes are to be written, or so many seconds.

        Args:
            client: that waits.
            at_most: bytes.
            seconds: for which it waits at most.
            own: whether only its own bytes count.
        """
        self._writer.await_writes(client, at_most, seconds, own=own)

    def close(self) -> None:
        """Give up every move; nothing can be put or read any more. Idempotent."""
        registry = self._registry
        if os.getpid() != registry.pid:
            return
        with registry.lock:
            registry.closed = True
            moving = [(entry, entry.move) for entry in registry.moving]
        # All of them first: each block that ends would let the next queued move begin.
        for _, move in moving:
            if move is not None:
                move.cancel()
        for entry, move in moving:
            if move is not None:
                self._reader.wait(entry, move)
        registry.release_written()
        self._copies.wait()

    def _check_usable(self) -> None:
        if self._registry.closed:
            raise OffloadError("the offload engine is closed")
        self._registry.check_process()
        failure = self._writer.failure
        if failure is not None:
            raise reports.again(failure) from failure.__cause__
