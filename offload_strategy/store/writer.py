"""The way out: where a ticket goes, and the move that takes it there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.store import error_messages as reports
from offload_strategy.store.buffer_allocator import POLL_SECONDS, BufferAllocator
from offload_strategy.store.device_copies import DeviceCopies
from offload_strategy.store.ticket import ALIGNMENT_BYTES, Entry, TicketState, Tier
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, KiB

#: Below this a copy costs less than another page on the disk.
_WORTH_BYTES = 64 * KiB


class Writer:
    """Places new tickets, and sends them out.

    Args:
        ledger: of the tickets.
        supply: buffers for what comes from a device.
        copies: from devices.
        recorder: counts stalls.
        write_behind: bytes that may wait to be written.
    """

    def __init__(
        self,
        registry: TicketRegistry,
        allocator: BufferAllocator,
        copies: DeviceCopies,
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
        """Wait while too much is waiting to be written (back-pressure)."""
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
        """Give bytes a place; an entry whose `move` is set has yet to be submitted.

        Args: see `TensorStore.put`.

        Raises:
            TierFullError: no tier has room.
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
        """Room in a host tier, if need be by evicting what is needed later."""
        with self._registry.lock:
            if tier.claim(nbytes):
                return True
            victims = [] if next_use is None else tier.victims(nbytes, next_use)
        for entry in victims:
            self._demote(entry)
        with self._registry.lock:
            return tier.claim(nbytes)

    def _demote(self, entry: Entry) -> None:
        """Write an entry of a host tier to its next tier; its memory is free when it is written."""
        payload = entry.payload
        if payload is None:  # freed, or sent out by another
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
            left = not entry.may_leave or entry.payload is None  # freed, or sent out by another
            if left or host_tier is None:
                tier.release_extents(stripes)
                return
            assert entry.payload is not None
            host_tier.release(entry.nbytes)
            entry.tier, entry.stripes, entry.begin = tier, stripes, lead
            copied = entry.copied
            move = self._make_move(
                entry, entry.payload, None if copied is None else copied.synchronize
            )
        move.submit()

    # ------------------------------------------------------------------ paths
    def _place_on_paths(self, entry: Entry, tier: Tier, payload: torch.Tensor) -> bool:
        lead = _lead(entry, tier, payload)
        stripes = tier.claim_extents(lead + entry.nbytes)
        if stripes is None:
            return False
        entry.stripes, entry.begin = stripes, lead
        try:
            memory, before = self._to_memory_of(tier, entry, payload)
            with self._registry.lock:
                self._make_move(entry, memory, before)
                self._registry.count()
        except BaseException:
            tier.release_extents(stripes)
            raise
        return True

    def _make_move(
        self, entry: Entry, memory: torch.Tensor, before: Callable[[], None] | None
    ) -> Move:
        """The move of an entry to its stripes; with the lock held. It is submitted without."""
        move = Move(
            client=entry.client,
            direction=Direction.WRITE,
            stripes=entry.stripes,
            address=memory.data_ptr() - entry.begin,
            nbytes=entry.begin + entry.nbytes,
            priority=Priority.WRITE_BACK,
            keep_alive=memory,
            before=before,
            one_block_at_a_time=entry.one_block_at_a_time,
            on_end=partial(self._ended, entry),
        )
        entry.state, entry.move = TicketState.WRITING, move
        self._registry.writing_bytes += entry.nbytes
        self._registry.writing_bytes_of[entry.client] += entry.nbytes
        self._registry.moving.add(entry)
        return move

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
    def _to_memory_of(
        self, tier: Tier, entry: Entry, payload: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The memory that a tier's paths read from, and what a write must wait for before it."""
        if payload.device.type == "cpu" or not tier.device_memory:
            return self._to_host(entry, payload)
        entry.payload = payload
        ready = torch.Event(payload.device)
        ready.record()
        return payload, ready.synchronize

    def _to_host(
        self, entry: Entry, payload: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """Give an entry its bytes in host memory; also what a write must wait for before it."""
        if payload.device.type == "cpu":
            entry.payload = payload
            return payload, None
        pinned = payload.device.type == "cuda"
        host = self._allocator.allocate_waiting(entry.client, entry.nbytes, pinned=pinned)
        self._copies.copy_out(entry, payload, host)
        copied = entry.copied
        if copied is None:
            return host, None

        def before() -> None:
            copied.synchronize()
            self._copies.release_written()

        return host, before


def _lead(entry: Entry, tier: Tier, payload: torch.Tensor) -> int:
    """How many bytes before the payload to write with it, so that it leaves without a copy.

    Direct I/O takes memory from the begin of a page on; tensors begin a little after one. Memory is
    there by whole pages, so what lies before a tensor in its page can be written along.
    """
    if not entry.whole_pages or entry.nbytes < _WORTH_BYTES or payload.device.type != "cpu":
        return 0
    if tier.checks:  # what is not ours may change while it is written: no checksum would hold
        return 0
    lead = int(payload.data_ptr()) % PAGE_BYTES
    return 0 if lead % ALIGNMENT_BYTES else lead
