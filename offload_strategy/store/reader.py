"""Loads of tickets into buffers of the pool, and copies to devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from timeit import default_timer as perf_counter

import torch

from offload_strategy.host_memory.buffers import with_own_storage
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.io.regions.region import ExternalFile
from offload_strategy.store import error_messages as reports
from offload_strategy.store.ticket import ALIGNMENT_BYTES, Entry, TicketState
from offload_strategy.store.ticket_registry import StorePart
from offload_strategy.telemetry import Direction
from offload_strategy.torch_support.accelerator import current_stream
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection
from offload_strategy.units import MiB

#: Bytes that are copied to a device together: backward waits for all of them.
_TOGETHER = 4 * MiB


class Reader(StorePart):
    """Loads stored tickets, and waits for them."""

    def payload(self, entry: Entry) -> torch.Tensor:
        """Return the bytes, loaded if necessary; raise StorageError if that failed."""
        while True:
            with self.registry.lock:
                self.registry.check_alive(entry)
                move = entry.move if entry.state is TicketState.LOADING else None
                payload = entry.payload if entry.source is None else entry.source
                if payload is not None:
                    if entry.state is TicketState.WRITING:
                        self.recorder.forwarded(entry.client, entry.nbytes)
                    return payload
            move = move or self.load(entry, Priority.NEEDED_NOW)
            # A load that has ended already must be awaited, too: it may have failed.
            if move is not None:
                begin = perf_counter()
                move.raise_priority()
                self.wait(move)
                self.recorder.stalled(entry.client, begin, reading=True)
                if move.state is MoveState.FAILED:
                    raise reports.failed(entry, move)

    def load(self, entry: Entry, priority: Priority) -> Move | None:
        """Start to load a stored entry; return None if it is not stored, or memory is missing."""
        self.registry.free_dropped()
        with self.registry.lock:
            self.registry.check_alive(entry)
            if entry.state is not TicketState.STORED:
                return None
        memory = self._memory_for(entry, priority)
        if memory is None:
            return None
        with UninterruptedSection():
            with self.registry.lock:
                if entry.state is not TicketState.STORED:
                    return None
                entry.state = TicketState.LOADING
                entry.move = move = Move(
                    client=entry.client,
                    direction=Direction.READ,
                    stripes=entry.stripes,
                    address=memory.data_ptr(),
                    nbytes=entry.begin + entry.nbytes,
                    priority=priority,
                    keep_alive=memory,
                    one_block_at_a_time=entry.one_block_at_a_time,
                    is_buffer=memory.is_cpu,
                    on_end=partial(self._ended, entry, memory),
                )
                self.registry.moving.add(move)
            move.submit()
        return move

    def wait(self, move: Move) -> None:
        """Wait for the end of a transfer, with warnings if a path does not answer."""
        begin = perf_counter()
        patience = reports.PATIENCE_SECONDS
        move.run_queued()
        while not move.ended.wait(patience):
            reports.still_waiting(move, perf_counter() - begin)
            patience *= 2

    def stage(self, entries: Sequence[Entry]) -> bool:
        """See `TensorStore.stage`."""
        ready: list[tuple[Entry, torch.Tensor]] = []
        kept: list[tuple[Entry, torch.Tensor]] = []
        all_there = True
        self.registry.check_process()
        with self.registry.lock:
            for entry in entries:
                if entry.staged is not None:
                    continue
                payload, source = entry.payload, entry.source
                if source is not None:
                    kept.append((entry, source))
                elif entry.is_in_host_memory and entry.state is not TicketState.LOADING:
                    assert payload is not None
                    ready.append((entry, payload))
                else:
                    all_there = False
        for device, sources in itertools.groupby(kept, lambda pair: pair[0].device):
            self.copies[device].keep(list(sources))
        while ready:
            device, nbytes, count = ready[0][0].device, 0, 0
            while count < len(ready) and nbytes < _TOGETHER and ready[count][0].device == device:
                nbytes += ready[count][0].nbytes
                count += 1
            together, ready = ready[:count], ready[count:]
            engine = self.copies[device]
            if not engine.asynchronous:
                return False
            hosts, after = [host for _, host in together], [entry.copied for entry, _ in together]
            for (entry, _), copy in zip(together, engine.load(hosts, after), strict=True):
                entry.staged = copy
        return all_there

    def on_device(self, entry: Entry, payload: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the bytes on the device of their entry, and whether the entry shares them."""
        if entry.device.type == "cpu":
            return payload, True
        engine = self.copies[entry.device]
        if payload.device.type != "cpu":
            payload.record_stream(current_stream(entry.device))
            return payload, True
        if not engine.asynchronous:
            return payload.to(entry.device), False
        [loaded] = engine.load([payload], [entry.copied])
        return engine.adopt(loaded), False

    def _memory_for(self, entry: Entry, priority: Priority) -> torch.Tensor | None:
        nbytes, pinned = entry.begin + entry.nbytes, False
        if entry.device.type != "cpu":
            engine = self.copies[entry.device]
            if entry.tier is not None and entry.tier.device_memory:
                return engine.incoming(nbytes)
            pinned = engine.asynchronous
        if priority is Priority.NEEDED_NOW:
            return self.allocate_now(nbytes, pinned=pinned)
        return self.pool.acquire(nbytes, pinned=pinned)

    def _ended(self, entry: Entry, memory: torch.Tensor, move: Move) -> None:
        payload = None
        entry.load_times = (move.queued_at, move.finished_at)
        if move.state is MoveState.DONE:
            try:
                payload = self._as_payload(entry, memory)
            except BaseException as error:  # for example, if the device is out of memory
                move.error, move.state = error, MoveState.FAILED
        with self.registry.lock:
            self.registry.moving.discard(move)
            entry.move = None
            if entry.state is TicketState.FREED:
                self.registry.forget(entry)
            elif payload is not None:
                self.registry.loaded(entry, payload)
            else:
                entry.state = TicketState.STORED
                self.registry.lost_copies += 1
        self.registry.free_dropped()

    def _as_payload(self, entry: Entry, memory: torch.Tensor) -> torch.Tensor:
        """Return the loaded bytes, aligned."""
        for stripe in entry.stripes if entry.tier is None else ():
            if isinstance(stripe.queue.region, ExternalFile):
                stripe.queue.region.check_unchanged()
        payload = memory[entry.begin :]
        if entry.begin % ALIGNMENT_BYTES and entry.device.type == "cpu":
            return self.allocate_now(entry.nbytes, pinned=False).copy_(payload)
        return with_own_storage(payload) if entry.begin and entry.device.type == "cpu" else payload
