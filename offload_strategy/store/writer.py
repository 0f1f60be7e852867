"""Writes of tickets: the choice of a tier, and the transfer to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from timeit import default_timer as perf_counter

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.store import error_messages as reports
from offload_strategy.store.copy_engine import sizes_in_buffer
from offload_strategy.store.ticket import ALIGNMENT_BYTES, Entry, TicketState, Tier
from offload_strategy.store.ticket_registry import StorePart
from offload_strategy.store.tiers import MemoryTier, PathTier
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, KiB

#: For smaller payloads a copy costs less than another page on the disk.
_WORTH_BYTES = 64 * KiB


@dataclass(eq=False)
class Writer(StorePart):
    """Places new tickets on tiers and starts their writes."""

    write_behind: int
    failure: OffloadError | None = None

    def await_room(
        self, client: str, payloads: Sequence[torch.Tensor], tiers: Sequence[Tier]
    ) -> int:
        """Wait while too many bytes are to be written; return for how many payloads is room."""
        if count := self._fitting(payloads, tiers):
            return count
        registry, nbytes = self.registry, payloads[0].nbytes
        begin = perf_counter()
        report_at = begin + reports.PATIENCE_SECONDS
        while registry.writing_bytes and registry.writing_bytes + nbytes > self.write_behind:
            registry.pause()
            if perf_counter() > report_at:
                report_at += reports.PATIENCE_SECONDS
                reports.still_full(registry.writing_bytes, tiers, perf_counter() - begin)
        self.recorder.stalled(client, begin)
        return max(1, self._fitting(payloads, tiers))

    def _fitting(self, payloads: Sequence[torch.Tensor], tiers: Sequence[Tier]) -> int:
        writing, nbytes = self.registry.writing_bytes, 0
        for count, payload in enumerate(payloads if writing else ()):
            nbytes += payload.nbytes
            behind = writing + nbytes > self.write_behind
            if behind and not any(tier.has_room(nbytes) for tier in tiers):
                return count
        return len(payloads)

    def place(
        self,
        payloads: Sequence[torch.Tensor],
        client: str,
        tiers: Sequence[Tier],
        next_uses: Sequence[float | None],
        one_block_at_a_time: bool,
        replaced: Entry | None,
        compute: torch.Stream | None,
    ) -> list[Entry]:
        """Return entries on the first tiers with room, to be submitted, or none at all."""
        entries: list[Entry] = []
        leaving: list[Entry] = []
        device = payloads[0].device
        try:
            for payload, next_use in zip(payloads, next_uses, strict=True):
                entry = Entry(client, payload.nbytes, device, next_use, one_block_at_a_time)
                entry.payload = payload
                entries.append(entry)
                tier = self._claim(entry, payload, tiers, replaced) if entry.nbytes else None
                if tier is not None and not payload.is_cpu:
                    if tier.device_memory:
                        entry.copied = self.copies[device].ready(compute)
                    elif not tier.is_own_device:
                        entry.source = payload
                        leaving.append(entry)
            if leaving:
                self._copy_out(leaving, compute, replaced)
            self._begin(entries)
        except BaseException:  # no tier has room, or no memory is left to pin, for instance
            for entry in entries:
                self.registry.free(entry)
            raise
        return entries

    def _claim(
        self, entry: Entry, payload: torch.Tensor, tiers: Sequence[Tier], replaced: Entry | None
    ) -> Tier:
        """Reserve room on the first tier that has some, which is returned."""
        for position, tier in enumerate(tiers):
            if isinstance(tier, MemoryTier):
                # A device has no memory to spare for both.
                over = replaced is not None and replaced.tier is tier and tier.is_host_memory
                if self._claim_memory(tier, entry, over_capacity=over):
                    entry.tier, entry.lower = tier, tiers[position + 1 :]
                    return tier
            elif isinstance(tier, PathTier):
                lead = _lead(entry, payload)
                stripes = tier.claim_extents(lead + entry.nbytes, lead)
                if stripes is not None:
                    entry.tier, entry.stripes, entry.begin = tier, stripes, lead
                    return tier
        raise reports.no_room(entry.nbytes, entry.client, tiers)

    def _copy_out(
        self, entries: Sequence[Entry], compute: torch.Stream | None, replaced: Entry | None
    ) -> None:
        """Start to copy the sources of entries to one host buffer."""
        engine = self.copies[entries[0].device]
        nbytes = sum(sizes_in_buffer(entries))
        buffer, after = None, None
        if replaced is not None and (kept := replaced.buffer) is not None:
            replaced.buffer = None
            if kept.nbytes == nbytes and engine.may_overwrite(kept, compute):
                buffer, after = kept, replaced.copied
        if buffer is None:
            buffer = self.allocate_waiting(entries[0].client, nbytes, pinned=engine.asynchronous)
        sources = [_bytes_of(entry.source) for entry in entries if entry.source is not None]
        engine.copy_out(entries, sources, buffer, compute, after)

    def _begin(self, entries: Sequence[Entry]) -> None:
        """Let the store know entries whose bytes are in their place, or on their way there."""
        with self.registry.lock:
            for entry in entries:
                if isinstance(entry.tier, MemoryTier):
                    entry.tier.note(entry)
                elif entry.stripes and entry.payload is not None:
                    self._make_move(entry, entry.payload)

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
        lead = _lead(entry, payload)
        for tier in entry.lower:
            if not isinstance(tier, PathTier):
                continue
            stripes = tier.claim_extents(lead + entry.nbytes, lead)
            if stripes is not None:
                break
        else:
            return
        with self.registry.lock:
            # It may have been freed, or demoted meanwhile.
            if not entry.may_leave or entry.payload is None or entry.tier is None:
                tier.release_extents(stripes)
                return
            entry.tier.release(entry)
            entry.tier, entry.stripes, entry.begin = tier, stripes, lead
            self._make_move(entry, entry.payload)
        self.submit([entry])

    def submit(self, entries: Sequence[Entry]) -> None:
        """Submit the writes of entries, as soon as the device has produced their bytes."""
        waiting: dict[torch.Event, list[Move]] = {}
        for entry in entries:
            move, copied = entry.move, entry.copied
            if move is not None and copied is None:
                move.submit()
            elif move is not None and copied is not None:
                waiting.setdefault(copied, []).append(move)
        for copied, moves in waiting.items():
            # The path's own time must not include the wait for the device.
            self.copies[entries[0].device].when_copied(copied, moves)

    def _make_move(self, entry: Entry, memory: torch.Tensor) -> None:
        """Make the transfer of an entry to its stripes; with the lock held. Submit it without."""
        entry.state = TicketState.WRITING
        entry.move = move = Move(
            client=entry.client,
            direction=Direction.WRITE,
            stripes=entry.stripes,
            address=memory.data_ptr() - entry.begin,
            nbytes=entry.begin + entry.nbytes,
            priority=Priority.WRITE_BACK,
            keep_alive=memory,
            one_block_at_a_time=entry.one_block_at_a_time,
            # A tensor of a device is written from a buffer.
            is_buffer=entry.device.type != "cpu" or self.pool.owns(memory),
            on_end=partial(self._ended, entry),
        )
        self.registry.writing_bytes += entry.nbytes
        self.registry.writing_bytes_of[entry.client] += entry.nbytes
        self.registry.moving.add(move)

    def _ended(self, entry: Entry, move: Move) -> None:
        registry = self.registry
        with registry.lock:
            registry.writing_bytes -= entry.nbytes
            registry.writing_bytes_of[entry.client] -= entry.nbytes
            registry.moving.discard(move)
            entry.move = None
            if entry.state is TicketState.FREED:
                registry.forget(entry)
            elif move.state is MoveState.DONE:
                entry.written_at = move.finished_at
                registry.written(entry)
            else:
                if move.error is not None:
                    self.failure = self.failure or reports.failed(entry, move)
                entry.state = TicketState.IN_MEMORY
                registry.forget(entry)
        registry.free_dropped()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as flat uint8."""
    flat = tensor if tensor.ndim == 1 else tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def _lead(entry: Entry, payload: torch.Tensor) -> int:
    """Return how many bytes before the payload to write with it to avoid a copy.

    Direct I/O takes memory from the begin of a page on; tensors begin a little after one. Memory is
    there by whole pages, so what lies before a tensor in its page can be written along.
    """
    if entry.nbytes < _WORTH_BYTES or payload.device.type != "cpu":
        return 0
    lead = int(payload.data_ptr()) % PAGE_BYTES
    return 0 if lead % ALIGNMENT_BYTES else lead
