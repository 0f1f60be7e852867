"""The store: offloads tensors to tiers, loads them, and frees them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from timeit import default_timer as perf_counter

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.io.queues.moves import Move, Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import Priority
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import error_messages as reports
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.reader import Reader
from offload_strategy.store.ticket import Entry, Ticket, TicketState, Tier
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.store.writer import Writer
from offload_strategy.telemetry import Recorder
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection
from offload_strategy.units import MiB

_CPU = torch.device("cpu")
#: So many bytes are returned before the next look at what can be freed.
_COLLECT_BYTES = 1 * MiB


class TensorStore:
    """Immutable tickets over tiers; a `put` waits if more than `write_behind` bytes would wait."""

    def __init__(self, pool: BufferPool, recorder: Recorder, write_behind: int) -> None:
        self.pool = pool
        self.copies = CopyEngines()
        self.recorder = recorder
        self.registry = TicketRegistry()
        common = (pool, self.registry, self.copies, recorder)
        self._writer, self._reader = Writer(*common, write_behind), Reader(*common)
        self._returned_bytes = 0

    # ------------------------------------------------------------------ offloading
    def put(
        self,
        payload: torch.Tensor,
        client: str,
        tiers: Sequence[Tier],
        *,
        one_block_at_a_time: bool = False,
        replaces: Ticket | None = None,
    ) -> Ticket:
        """Offload the bytes of a contiguous tensor, which must not change any more.

        It goes to the first tier that has room; for `one_block_at_a_time` see `Move`. A ticket that
        it `replaces` is freed once the new one is current, or the other way round: in host memory,
        the tier holds both until then.

        Raises TierFullError if no tier has room, StorageError if an earlier write failed.
        """
        [ticket] = self.put_all(
            [payload], client, tiers, [None], one_block_at_a_time, replaces=replaces
        )
        return ticket

    def put_all(
        self,
        payloads: Sequence[torch.Tensor],
        client: str,
        tiers: Sequence[Tier],
        next_uses: Sequence[float | None],
        one_block_at_a_time: bool,
        *,
        replaces: Ticket | None = None,
        compute: torch.Stream | None = None,
    ) -> list[Ticket]:
        """Offload tensors of one device as `put` does, which costs less for each.

        `next_uses` are the times of their next reads on a clock that all tickets of these tiers
        share: in a host tier, tickets with a later next use are evicted to make room; with None
        one neither evicts others nor is evicted. `compute` is the stream that produced them, if not
        the current one.
        """
        self._check_usable()
        self._collect()
        if payloads[0].is_cpu:  # pinned memory stays
            self.pool.look()
        replaced = None if replaces is None else replaces.entry
        tickets: list[Ticket] = []
        while (begin := len(tickets)) < len(payloads):
            end = begin + self._writer.await_room(client, payloads[begin:], tiers)
            those, uses = payloads[begin:end], next_uses[begin:end]
            with UninterruptedSection():
                entries = self._writer.place(
                    those, client, tiers, uses, one_block_at_a_time, replaced, compute
                )
                tickets += [self.registry.ticket(entry) for entry in entries]
                self._writer.submit(entries)
        return tickets

    def adopt(
        self, queue: PathQueue, offset: int, nbytes: int, client: str, device: torch.device = _CPU
    ) -> Ticket:
        """Return a ticket for a range of an existing file, which is read when needed.

        `queue` is over an `ExternalFile`, which must stay open as long as its tickets; `get`
        returns the bytes on `device`. Raises StorageError if the file is too short.
        """
        assert isinstance(queue.region, ExternalFile)
        extent, begin = queue.region.cover(offset, nbytes)
        stripes = [Stripe(queue, extent, 0, begin + nbytes)] if nbytes else []
        return self.adopt_stripes(stripes, begin, nbytes, client, device)

    def adopt_stripes(
        self, stripes: Sequence[Stripe], begin: int, nbytes: int, client: str, device: torch.device
    ) -> Ticket:
        """Return a ticket for `nbytes` of stripes of existing files, from `begin` on."""
        self._check_usable()
        entry = Entry(client, nbytes, device)
        if nbytes:
            entry.stripes, entry.begin, entry.state = stripes, begin, TicketState.STORED
        else:
            entry.payload = torch.empty(0, dtype=torch.uint8, device=device)
        with UninterruptedSection():
            return self.registry.ticket(entry)

    def borrow(self, client: str, nbytes: int, device: torch.device = _CPU) -> torch.Tensor:
        """Return a flat uint8 tensor with undefined contents, to be filled and then `put`.

        On the host it is a page-aligned buffer, which is written without a copy. If the budget is
        used up, this waits for writes to free buffers, or exceeds it if none is in flight.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._writer.allocate_waiting(client, nbytes, pinned=False)

    # ------------------------------------------------------------------ reading
    def prefetch(self, ticket: Ticket) -> bool:
        """Load a stored ticket if there is room; return whether it is or will be in memory."""
        self.registry.release_written()
        begun = self._reader.load(ticket.entry, Priority.PREFETCH)
        return begun is not None or ticket.state is not TicketState.STORED

    def stage(self, tickets: Sequence[Ticket]) -> bool:
        """Start to copy tickets' bytes to the devices that they came from.

        Those that are not in host memory, or did not come from an accelerator, are left out;
        returns whether there are none. The copies start after what this thread has launched so far.
        """
        return self._reader.stage([ticket.entry for ticket in tickets])

    def get(self, ticket: Ticket) -> torch.Tensor:
        """Return the ticket's bytes as a flat uint8 tensor on the device that they came from.

        As long as they have not left memory, it is the tensor itself that was `put`, of whatever
        shape and dtype. The tensor is shared and must not be changed. Waits for a load if
        necessary. Raises StorageError if the bytes could not be read.
        """
        return self._get(ticket)[0]

    def _get(self, ticket: Ticket) -> tuple[torch.Tensor, bool]:
        """Return what `get` does, and whether the ticket shares it."""
        entry = ticket.entry
        self._returned_bytes += entry.nbytes
        if self._returned_bytes >= _COLLECT_BYTES:
            self._collect()
        if entry.staged is not None:
            with self.registry.lock:
                staged, entry.staged = entry.staged, None
            if staged is not None:
                shared = staged.tensor is entry.source
                return self.copies[entry.device].adopt(staged), shared
        return self._reader.on_device(entry, self._reader.payload(entry))

    def private(self, ticket: Ticket) -> torch.Tensor:
        """Return bytes that the caller may change: a copy, or what was loaded from a path."""
        payload, shared = self._get(ticket)
        if not shared:
            return payload
        entry = ticket.entry
        with self.registry.lock:
            if entry.is_copy and entry.payload is payload:
                self.registry.stored(entry)
                return payload
        return self.borrow(entry.client, entry.nbytes, entry.device).copy_(payload)

    def take(self, ticket: Ticket) -> torch.Tensor:
        """Free the ticket and return its bytes, which the caller may change; avoids copies."""
        payload = self.writable(ticket)
        self.free(ticket)
        return payload

    def writable(self, ticket: Ticket) -> torch.Tensor:
        """Return the bytes as `take` does; free the ticket before changing them."""
        self.registry.check_alive(ticket.entry)
        # Nobody will read what is being written: the bytes in memory are used.
        if (writing := self.cancel_write(ticket)) is not None:
            self._reader.wait(writing)
        return self.get(ticket)

    # ------------------------------------------------------------------ freeing
    def cancel_write(self, ticket: Ticket) -> Move | None:
        """Cancel a write in flight, so that the bytes stay in memory; return it, without a wait."""
        entry = ticket.entry
        with self.registry.lock:
            move = entry.move if entry.state is TicketState.WRITING else None
        if move is not None:
            move.cancel()
        return move

    def evict(self, ticket: Ticket) -> None:
        """Free the copy in memory of a ticket that is stored on a path."""
        with self.registry.lock:
            if ticket.entry.is_copy:
                self.registry.stored(ticket.entry)

    def let_go(self, ticket: Ticket, storage: torch.UntypedStorage) -> None:
        """Read a ticket's bytes in the memory of a storage no more: that is about to be freed."""
        entry, registry = ticket.entry, self.registry
        if entry.source is not None:
            self.copies[entry.device].release_source(entry)

        def is_read() -> bool:
            payload = entry.payload
            return payload is not None and payload.untyped_storage()._cdata == storage._cdata

        with registry.lock:
            move = entry.move if entry.state is TicketState.WRITING and is_read() else None
        if move is not None:
            self._reader.wait(move)
        with registry.lock:
            # What is in a host tier may be written at any time.
            if entry.may_leave and entry.payload is not None and is_read():
                entry.payload = entry.payload.clone()

    def free(self, ticket: Ticket, *, keeps_buffer: bool = False) -> None:
        """Free a ticket in any state.

        With `keeps_buffer` a ticket that replaces it may have its pinned memory, although the
        device has not read it yet.
        """
        entry = ticket.entry
        pinned = keeps_buffer and entry.device.type != "cpu" and entry.may_leave
        buffer = entry.payload if pinned and entry.is_in_host_memory else None
        self.registry.free(entry)
        entry.buffer = buffer

    def trim(self) -> None:
        """Free idle buffers before a time in which little will be read."""
        self._collect()
        self.pool.trim()

    def pass_begins(self) -> None:
        """Free idle buffers that would raise the peak; see [Note: idle memory and peaks]."""
        self._collect()
        self.pool.pass_begins()

    def wait_for_writes(self, of: Ticket | None = None) -> None:
        """Wait until all writes, or that `of` a ticket, have ended; StorageError if one failed."""
        if of is not None and of.state is TicketState.WRITING and (move := of.entry.move):
            self._reader.wait(move)
        while of is None and self.registry.writing_bytes and not self.registry.closed:
            self.registry.pause()
        self._collect()
        self._check_usable()

    def await_writes(self, client: str, at_most: int, seconds: float, *, own: bool = False) -> None:
        """Wait until `at_most` bytes, or so many of its `own`, are to be written, or so long."""
        begin, registry = perf_counter(), self.registry
        while (registry.writing_bytes_of[client] if own else registry.writing_bytes) > at_most:
            if perf_counter() >= begin + seconds:
                break
            registry.pause()
        self.recorder.stalled(client, begin)

    def close(self) -> None:
        """Cancel every transfer; nothing can be offloaded or loaded any more. Idempotent."""
        registry = self.registry
        if os.getpid() != registry.pid:
            return
        with registry.lock:
            registry.closed = True
            moving = list(registry.moving)
        # Cancel all of them first: each block that ends would start the next queued transfer.
        for move in moving:
            move.cancel()
        for move in moving:
            self._reader.wait(move)
        registry.release_written()
        for engine in tuple(self.copies.values()):
            engine.close()

    def _collect(self) -> None:
        """Free what was dropped, written and copied, without waiting."""
        self._returned_bytes = 0
        self.registry.release_written()
        self.registry.free_dropped()
        for engine in tuple(self.copies.values()):
            engine.collect()

    def _check_usable(self) -> None:
        if self.registry.closed:
            raise OffloadError("the offload engine is closed")
        self.registry.check_process()
        if (failure := self._writer.failure) is not None:
            raise reports.again(failure) from failure.__cause__
