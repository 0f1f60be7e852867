"""Writes of tickets: the choice of a tier, and the transfer to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.store import error_messages as reports
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.ticket import ALIGNMENT_BYTES, Entry, TicketState, Tier
from offload_strategy.store.ticket_registry import POLL_SECONDS, BufferAllocator, TicketRegistry
from offload_strategy.store.tiers import MemoryTier, PathTier
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, KiB

#: For smaller payloads a copy costs less than another page on the disk.
_WORTH_BYTES = 64 * KiB


@dataclass(eq=False)
class Writer:
    """Places new tickets on tiers and starts their writes."""

    registry: TicketRegistry
    allocator: BufferAllocator
    copies: CopyEngines
    recorder: Recorder
    #: Bytes that may wait to be written.
    write_behind: int
    #: The first write that failed.
    failure: OffloadError | None = None

    def await_room(self, client: str, nbytes: int, tiers: Sequence[Tier]) -> None:
        """Wait while too many bytes are to be written (back-pressure)."""
        registry = self.registry
        if not registry.writing_bytes or registry.writing_bytes + nbytes <= self.write_behind:
            return
        if any(tier.has_room(nbytes) for tier in tiers):
            return
        begin = time.perf_counter()
        report_at = begin + reports.PATIENCE_SECONDS
        while registry.writing_bytes and registry.writing_bytes + nbytes > self.write_behind:
            self._pause()
            if time.perf_counter() > report_at:
                report_at += reports.PATIENCE_SECONDS
                reports.still_full(registry.writing_bytes, tiers, time.perf_counter() - begin)
        self.recorder.stalled(client, begin)

    def await_writes(self, client: str, at_most: int, seconds: float, *, own: bool = False) -> None:
        """See `TensorStore.await_writes`."""
        begin = time.perf_counter()
        registry = self.registry
        while (registry.writing_bytes_of[client] if own else registry.writing_bytes) > at_most:
            if time.perf_counter() >= begin + seconds:
                break
            self._pause()
        self.recorder.stalled(client, begin)

    def _pause(self) -> None:
        time.sleep(POLL_SECONDS)
        self.registry.release_written()

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
        """Return an entry on the first tier with room, to be submitted; see `TensorStore.put`."""
        nbytes, hints = payload.numel(), (next_use, whole_pages, one_block_at_a_time)
        if nbytes == 0:
            entry = Entry(client, 0, payload.device, None, payload=payload)
            with self.registry.lock:
                self.registry.count()
            return entry
        for position, tier in enumerate(tiers):
            entry = Entry(client, nbytes, payload.device, tier, *hints)
            if isinstance(tier, MemoryTier):
                entry.lower = [t for t in tiers[position + 1 :] if isinstance(t, PathTier)]
                replaces = replaced is not None and replaced.tier is tier
                if self._place_in_memory(entry, tier, payload, replaces=replaces):
                    return entry
            elif isinstance(tier, PathTier) and self._place_on_paths(entry, tier, payload):
                return entry
        raise reports.no_room(nbytes, client, tiers)

    # ------------------------------------------------------------------ memory
    def _place_in_memory(
        self, entry: Entry, tier: MemoryTier, payload: torch.Tensor, *, replaces: bool
    ) -> bool:
        if not self._claim_memory(tier, entry, over_capacity=replaces):
            return False
        try:
            if tier.is_own_device:
                entry.payload = payload
            else:
                self._to_host(entry, payload)
        except BaseException:  # no memory left to pin, for instance
            with self.registry.lock:
                tier.release(entry)
            raise
        with self.registry.lock:
            self.registry.count()
            tier.note(entry)
        return True

    def _claim_memory(self, tier: MemoryTier, entry: Entry, *, over_capacity: bool) -> bool:
        """Reserve room, if necessary by evicting tickets that are needed later."""
        with self.registry.lock:
            if tier.claim(entry.nbytes, over_capacity=over_capacity):
                return True
            victims = [] if entry.next_use is None else tier.victims(entry.nbytes, entry.next_use)
        for victim in victims:
            self._demote(victim)
        with self.registry.lock:
            return tier.claim(entry.nbytes)

    def _demote(self, entry: Entry) -> None:
        """Write an entry of a host tier to its next tier, which frees its memory."""
        payload = entry.payload
        if payload is None:  # freed, or demoted by another thread
            return
        for tier in entry.lower:
            assert isinstance(tier, PathTier)
            lead = _lead(entry, tier, payload)
            if (stripes := tier.claim_extents(lead + entry.nbytes)) is not None:
                break
        else:
            with self.registry.lock:
                if isinstance(entry.tier, MemoryTier):
                    entry.tier.note(entry)
            return
        with self.registry.lock:
            # It may have been freed, or demoted meanwhile.
            if not entry.may_leave or entry.payload is None or entry.tier is None:
                tier.release_extents(stripes)
                return
            entry.tier.release(entry)
            entry.tier, entry.stripes, entry.begin = tier, stripes, lead
            self._make_move(entry, entry.payload)
        self.submit(entry)

    # ------------------------------------------------------------------ paths
    def _place_on_paths(self, entry: Entry, tier: PathTier, payload: torch.Tensor) -> bool:
        lead = _lead(entry, tier, payload)
        stripes = tier.claim_extents(lead + entry.nbytes)
        if stripes is None:
            return False
        entry.stripes, entry.begin = stripes, lead
        try:
            memory = payload
            if tier.device_memory and payload.device.type != "cpu":
                entry.payload = payload
                entry.copied = self.copies.of(payload.device).ready()
            else:
                memory = self._to_host(entry, payload)
            with self.registry.lock:
                self._make_move(entry, memory)
                self.registry.count()
        except BaseException:
            tier.release(entry)
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
            engine = self.copies.of(entry.device)
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
        self.registry.writing_bytes += entry.nbytes
        self.registry.writing_bytes_of[entry.client] += entry.nbytes
        self.registry.moving.add(entry)

    def _ended(self, entry: Entry, move: Move) -> None:
        registry = self.registry
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
                registry.forget(entry)
        registry.free_dropped()

    def _to_host(self, entry: Entry, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload in host memory, to which a device may still be copying it."""
        if payload.device.type == "cpu":
            entry.payload = payload
            return payload
        engine = self.copies.of(payload.device)
        host = self.allocator.allocate_waiting(
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
