"""Saved tensors on their way to the tiers: batches, bytes in flight, and rates.

[Note: batches]
To give one tensor to the store after an operation takes several times as long as to give the next
one right after it (caches hold tensors), and each wakes a thread that takes a core from
computation. So items wait for each other as long as they are a small share of what a pass saves.

[Note: bytes of an operation under way]
Some operations save a tensor first and let their kernel fill it afterwards, without a new version
(the noise of `rrelu`, running statistics, cuDNN's dropout states). So bytes are given to the store
only when the operation that saved them has returned: when autograd has made another node on this
thread, which its sequence number tells, or when the forward pass ends.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from operator import itemgetter

import torch

from offload_strategy.activations.forward_records import SavedItem, Trace
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.telemetry import Direction
from offload_strategy.torch_support.accelerator import current_stream, is_asynchronous
from offload_strategy.units import MiB

CLIENT = "activations"
#: Of the node that this thread made last.
_sequence_number = torch._C._autograd._get_sequence_nr
#: Largest batch in bytes, and as a share of what a forward pass saves.
_MOST_BYTES = 48 * MiB
_SHARE = 0.07
#: Largest batch on an accelerator, whose copies to the host are launched together; with what the
#: copy engine keeps it may take 16 MiB.
DEVICE_BATCH_BYTES = 4 * MiB
#: A batch that a path cannot write in so many seconds would cause bursts: then it is smaller.
_SECONDS = 0.03
_SLOW_BYTES = 16 * MiB
_SLOW_SHARE = 0.03
#: Largest wait for free memory: a slower path has failed, which is reported elsewhere.
_PATIENCE_SECONDS = 60.0


def batch_bytes(saved_bytes: int, rate: float | None = None) -> int:
    """Return the bytes of a batch of a pass that saves so many, at a write rate in bytes/s."""
    most = min(_MOST_BYTES, int(_SHARE * saved_bytes))
    if rate is None:
        return most
    return max(min(_SLOW_BYTES, int(_SLOW_SHARE * saved_bytes)), min(most, int(rate * _SECONDS)))


#: An item, its next use, the node of the operation that saved it, and the stream where that runs.
_Waiting = tuple[weakref.ref[SavedItem], int, int, torch.Stream | None]


class _Batch(threading.local):
    """The batch of one thread's pass."""

    def __init__(self) -> None:
        self.items: list[_Waiting] = []
        self.nbytes = 0


class TierWrites:
    """Gives items, which hold their bytes until then, to the store in batches; knows its load."""

    def __init__(self, store: TensorStore, tiers: Sequence[Tier], *, keep_originals: bool) -> None:
        self.store = store
        self._keep_originals = keep_originals
        self._tiers = list(tiers)
        self._host = [tier for tier in tiers if tier.is_host_memory]
        self._queues = [queue for tier in tiers for queue in tier.queues]
        self._batch = _Batch()
        #: Whether an accelerator computes: its memory is free when a copy to the host is over.
        self.on_device = False

    # ------------------------------------------------------------------ batches
    def add(self, item: SavedItem, next_use: int, at_least: int, device: torch.device) -> None:
        """Add an item to this thread's batch, which leaves at so many bytes; see `put`."""
        stream, batch = None, self._batch
        if is_asynchronous(device):  # where each pack has settled before
            stream = current_stream(device)
        else:
            self.settle(item.record.trace, at_least)
        batch.items.append((weakref.ref(item), next_use, _sequence_number(), stream))
        batch.nbytes += item.nbytes

    def settle(self, trace: Trace, at_least: int) -> None:
        """Flush a batch of so many bytes unless the operation under way has saved all of it."""
        batch = self._batch
        if batch.nbytes >= at_least and batch.items and batch.items[0][2] != _sequence_number():
            self.flush(trace)

    def flush(self, trace: Trace | None = None, *, ended: bool = False) -> None:
        """Give the batch to the store; if a pass has not `ended`, not what is being saved."""
        batch = self._batch
        waiting, batch.items, batch.nbytes = batch.items, [], 0
        node = None if ended else _sequence_number()
        found = []
        for one in waiting:
            reference, next_use, saved_by, stream = one
            item = reference()
            if item is None or item.payload is None:
                continue
            if saved_by == node:
                batch.items.append(one)
                batch.nbytes += item.nbytes
                continue
            if item.is_emptied:
                # Whoever emptied its storage fills it again before backward, which reads it there.
                item.record.trace.left_bytes -= item.nbytes
                continue
            if self._keep_originals:
                item.original, item.payload = item.payload, item.payload.clone()
            found.append(((item.payload.device, stream), item, item.payload, next_use))
        times = None if trace is None else trace.device_times
        stall_seconds = self.store.recorder.stall_seconds
        stalled = stall_seconds[CLIENT]
        for (_, stream), group in itertools.groupby(found, itemgetter(0)):
            _, items, payloads, next_uses = zip(*group, strict=True)
            with nullcontext() if times is None else times.forward.wait():
                tickets = self.store.put_all(
                    payloads, CLIENT, self._tiers, next_uses, payloads[0].is_cpu, compute=stream
                )
            for item, ticket in zip(items, tickets, strict=True):
                item.ticket = ticket
                item.storage.entry = ticket.entry
                item.payload = None
        if trace is not None:
            trace.held += stall_seconds[CLIENT] - stalled

    def discard(self) -> None:
        """Keep this thread's batch in memory, because its pass has failed."""
        self._batch.items, self._batch.nbytes = [], 0

    # ------------------------------------------------------------------ load of the tiers
    def leaving_bytes(self) -> int:
        """Return the bytes of activations that are leaving the computing device's memory."""
        if self.on_device:
            leaving = sum(engine.source_bytes() for engine in tuple(self.store.copies.values()))
        else:
            leaving = self.store.registry.writing_bytes_of[CLIENT]
        return leaving + self._batch.nbytes

    def release_at_least(self, nbytes: int) -> None:
        """Wait until so many of the bytes that leave the computing device are free, if any."""
        if nbytes <= 0:
            return
        self.flush()
        at_most = max(0, self.leaving_bytes() - self._batch.nbytes - nbytes)
        if self.on_device:
            for engine in tuple(self.store.copies.values()):
                engine.release_sources(at_most)
        else:
            self.store.await_writes(CLIENT, at_most, _PATIENCE_SECONDS, own=True)

    def rate(self, *, write: bool) -> float | None:
        """Return the bytes per second of all paths together, or None if unknown."""
        direction = Direction.WRITE if write else Direction.READ
        known = [rate for queue in self._queues if (rate := queue.bandwidth.rate(direction))]
        return sum(known) * len(self._queues) / len(known) if known else None

    def copy_rate(self) -> float | None:
        """Return the bytes per second of copies from a device to the host, or None if unknown."""
        engines = tuple(self.store.copies.values())
        return min((rate for engine in engines if (rate := engine.outgoing.rate)), default=None)

    def copy_window(self) -> int:
        """Return the bytes that may be on their way to the host before a device waits for them."""
        return max((engine.window_bytes for engine in tuple(self.store.copies.values())), default=0)

    def has_room_in_memory(self, nbytes: int) -> bool:
        """Return whether a host tier has room for so many bytes."""
        return any(tier.has_room(nbytes) for tier in self._host)
