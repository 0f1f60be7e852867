"""Writes of tickets: the choice of a tier, and the transfer to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.store import error_messages as reports
from offload_strategy.store.buffer_allocator import POLL_SECONDS, BufferAllocator
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.ticket import ALIGNMENT_BYTES, Entry, TicketState, Tier
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, KiB

#: For smaller payloads a copy costs less than another page on the disk.
_WORTH_BYTES = 64 * KiB


class Writer:
    """Places new tickets on tiers and starts their writes.

    Args:
        registry: Registry of the tickets.
        allocator: Allocates host buffers for tensors of a device.
        copies: Copies from devices.
        recorder: Counts stalls.
        write_behind: Bytes that may wait to be written.
    """

    def __init__(
        self,
        registry: TicketRegistry,
        allocator: BufferAllocator,
        copies: CopyEngines,
        recorder: Recorder,
        write_behind: int,
    ) -> None:
        self._registry = registry
        self._allocator = allocator
        self._copies = copies
        self._recorder = recorder
        self._write_behind = write_behind
        #: The first write that failed.
        self.failure: OffloadError | None = None

    def await_room(self, client: str, nbytes: int, tiers: Sequence[Tier]) -> None:
        """Wait while too many bytes are to be written (back-pressure)."""
        registry = self._registry
        if not registry.writing_bytes or registry.writing_bytes + nbytes <= self._write_behind:
            return
        if any(tier.has_room(nbytes) for tier in tiers):
            return
        begin = time.perf_counter()
        report_at = begin + reports.PATIENCE_SECONDS
        while registry.writing_bytes and registry.writing_bytes + nbytes > self._write_behind:
            self._pause()
            if time.perf_counter() > report_at:
                report_at += reports.PATIENCE_SECONDS
                reports.still_full(registry.writing_bytes, tiers, time.perf_counter() - begin)
        self._recorder.stalled(client, begin)

    def await_writes(self, client: str, at_most: int, seconds: float, *, own: bool = False) -> None:
        """See `TensorStore.await_writes`."""
        begin = time.perf_counter()
        registry = self._registry
        while (registry.writing_bytes_of[client] if own else registry.writing_bytes) > at_most:
            if time.perf_counter() >= begin + seconds:
                break
            self._pause()
        self._recorder.stalled(client, begin)

    def _pause(self) -> None:
        time.sleep(POLL_SECONDS)
        self._registry.release_written()

    def place(
        self,
        payload: torch.Tensor,
        client: str,
        tiers: Sequence[Tier],
        next_use: float | None,
        whole_pages: bool,
        one_block_at_a_time: bool,
        replaced: Entry | None = None,
    ) -> Entry:
        """Return an entry on the first tier with room, to be submitted.

        For the arguments see `TensorStore.put`.

        Raises:
            TierFullError: If no tier has room.
        """
        nbytes = payload.numel()
        if nbytes == 0:
            entry = Entry(client, 0, payload.device, None)
            entry.payload = payload
            with self._registry.lock:
                self._registry.count()
            return entry
        for position, tier in enumerate(tiers):
            entry = Entry(client, nbytes, payload.device, tier, next_use)
            entry.whole_pages, entry.one_block_at_a_time = whole_pages, one_block_at_a_time
            if tier.is_host_memory:
                entry.lower = [t for t in tiers[position + 1 :] if not t.is_host_memory]
                replaces = replaced is not None and replaced.tier is tier
                if self._place_in_host(entry, tier, payload, replaces=replaces):
                    return entry
            elif self._place_on_paths(entry, tier, payload):
                return entry
        raise reports.no_room(nbytes, client, tiers)

    # ------------------------------------------------------------------ host tiers
    def _place_in_host(
        self, entry: Entry, tier: Tier, payload: torch.Tensor, *, replaces: bool
    ) -> bool:
        if replaces:
            with self._registry.lock:
                tier.claim_over_capacity(entry.nbytes)
        elif not self._claim_host(tier, entry.nbytes, entry.next_use):
            return False
        try:
            self._to_host(entry, payload)
        except BaseException:  # no memory left to pin, for instance
            with self._registry.lock:
                tier.release(entry.nbytes)
            raise
        with self._registry.lock:
            self._registry.count()
            tier.note(entry)
        return True

    def _claim_host(self, tier: Tier, nbytes: int, next_use: float | None) -> bool:
        """Reserve room in a host tier, if necessary by evicting tickets that are needed later."""
        with self._registry.lock:
            if tier.claim(nbytes):
                return True
            victims = [] if next_use is None else tier.victims(nbytes, next_use)
        for entry in victims:
            self._demote(entry)
        with self._registry.lock:
            return tier.claim(nbytes)

    def _demote(self, entry: Entry) -> None:
        """Write an entry of a host tier to its next tier, which frees its memory."""
        payload = entry.payload
        if payload is None:  # freed, or demoted by another thread
            return
        tier, stripes, lead = None, None, 0
        for tier in entry.lower:
            lead = _lead(entry, tier, payload)
            if (stripes := tier.claim_extents(lead + entry.nbytes)) is not None:
                break
        with self._registry.lock:
            host_tier = entry.tier
            if tier is None or stripes is None:
                if host_tier is not None:
                    host_tier.note(entry)
                return
            left = not entry.may_leave or entry.payload is None  # freed, or demoted meanwhile
            if left or host_tier is None:
                tier.release_extents(stripes)
                return
            assert entry.payload is not None
            host_tier.release(entry.nbytes)
            entry.tier, entry.stripes, entry.begin = tier, stripes, lead
            self._make_move(entry, entry.payload)
        self.submit(entry)

    # ------------------------------------------------------------------ paths
    def _place_on_paths(self, entry: Entry, tier: Tier, payload: torch.Tensor) -> bool:
        lead = _lead(entry, tier, payload)
        stripes = tier.claim_extents(lead + entry.nbytes)
        if stripes is None:
            return False
        entry.stripes, entry.begin = stripes, lead
        try:
            memory = self._to_memory_of(tier, entry, payload)
            with self._registry.lock:
                self._make_move(entry, memory)
                self._registry.count()
        except BaseException:
            tier.release_extents(stripes)
            raise
        return True

    def submit(self, entry: Entry) -> None:
        """Submit the write of an entry, as soon as the device has produced its bytes."""
        move, copied = entry.move, entry.copied
        if move is None:
            return
        if copied is None:
            move.submit()
        else:
            # The path's own time must not include the wait for the device.
            engine = self._copies.of(entry.device)
            engine.when_copied(copied, move.keep_alive, move.submit)

    def _make_move(self, entry: Entry, memory: torch.Tensor) -> None:
        """Make the transfer of an entry to its stripes; with the lock held. Submit it without."""
        move = Move(
            client=entry.client,
            direction=Direction.WRITE,
            stripes=entry.stripes,
            address=memory.data_ptr() - entry.begin,
            nbytes=entry.begin + entry.nbytes,
            priority=Priority.WRITE_BACK,
            keep_alive=memory,
            one_block_at_a_time=entry.one_block_at_a_time,
            on_end=partial(self._ended, entry),
        )
        entry.state, entry.move = TicketState.WRITING, move
        self._registry.writing_bytes += entry.nbytes
        self._registry.writing_bytes_of[entry.client] += entry.nbytes
        self._registry.moving.add(entry)

    def _ended(self, entry: Entry, move: Move) -> None:
        registry = self._registry
        with registry.lock:
            registry.writing_bytes -= entry.nbytes
            registry.writing_bytes_of[entry.client] -= entry.nbytes
            registry.moving.discard(entry)
            entry.move = None
            if entry.state is TicketState.FREED:
                registry.forget(entry)
            elif move.state is MoveState.DONE:
                entry.written_at = move.finished_at
                registry.written(entry)
            else:
                if move.state is MoveState.FAILED:
                    self.failure = self.failure or reports.failed(entry, move)
                entry.state = TicketState.IN_MEMORY
                registry.release_stripes(entry)
        registry.free_dropped()

    # ------------------------------------------------------------------ memory
    def _to_memory_of(self, tier: Tier, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        """Return the memory to write from."""
        if payload.device.type == "cpu" or not tier.device_memory:
            return self._to_host(entry, payload)
        entry.payload = payload
        entry.copied = self._copies.of(payload.device).ready()
        return payload

    def _to_host(self, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload in host memory, to which a device may still be copying it."""
        if payload.device.type == "cpu":
            entry.payload = payload
            return payload
        engine = self._copies.of(payload.device)
        host = self._allocator.allocate_waiting(
            entry.client, entry.nbytes, pinned=engine.asynchronous
        )
        engine.copy_out(entry, payload, host)
        return host


def _lead(entry: Entry, tier: Tier, payload: torch.Tensor) -> int:
    """Return how many bytes before the payload to write with it to avoid a copy.

    Direct I/O takes memory from the begin of a page on; tensors begin a little after one. Memory is
    there by whole pages, so what lies before a tensor in its page can be written along.
    """
    if not entry.whole_pages or entry.nbytes < _WORTH_BYTES or payload.device.type != "cpu":
        return 0
    if tier.checks:  # what is not ours may change while it is written: no checksum would hold
        return 0
    lead = int(payload.data_ptr()) % PAGE_BYTES
    return 0 if lead % ALIGNMENT_BYTES else lead
