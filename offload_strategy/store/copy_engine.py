"""Copies between an accelerator and host buffers, on streams of their own.

[Note: the device is behind the host]
The host launches operations long before the device executes them. So memory must not wait for the
host to see that a copy is over. It is freed in the order of the device instead: after a bounded
number of bytes, the compute stream waits for the copy, and the reference is dropped; the allocator
gives the memory to what the compute stream does later. In the other direction memory is allocated
on the compute stream, and the incoming copy waits until the device has reached the point at which
the host asked for it. So neither direction needs more device memory than these windows.

[Note: many small tensors]
To launch a copy takes the host longer than a small tensor needs to cross the link. So many that lie
together in a buffer of the host cross it in one copy, through a staging buffer on the device, where
one kernel distributes or gathers them. All of that happens on the stream of the copies, in order.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.bandwidth.estimator import RecentRate
from offload_strategy.io.queues.moves import Move
from offload_strategy.store.ticket import CopyOut, DeviceCopy, Entry, TicketState
from offload_strategy.torch_support.accelerator import (
    ReleaseWindow,
    current_stream,
    elapsed_seconds,
    is_asynchronous,
    using_stream,
)
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Bytes whose copies to the host may be under way before the compute stream waits for the first,
#: unless two of the largest tensor are more.
_WINDOW_BYTES = 12 * MiB
#: How often to look whether a device has reached an event, before a path may write.
_POLL_SECONDS = 0.0002
#: Tensors that are many, the largest staging buffer for them, and by how much more they may lie
#: apart than they are large together.
_MANY = 8
_STAGING_BYTES = 8 * MiB
_MOST_SPREAD = 1.25


class CopyEngine:
    """All copies between one device and the host, for any thread and its current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = is_asynchronous(device)
        self._lock = threading.Lock()
        self._largest = 0
        #: Of the latest copies to the host, by the device's clock.
        self.outgoing = RecentRate()
        # Copies whose sources are still referenced, by compute stream: only that stream can wait
        # for them before the memory is used again. Then those whose host buffers are to be kept.
        self._windows: dict[int, ReleaseWindow[CopyOut]] = {}
        self._released: deque[CopyOut] = deque()
        # Copies to the device, the event at their end, and the buffers that they read.
        self._loads = deque[tuple[torch.Event, Sequence[DeviceCopy], Sequence[torch.Tensor]]]()
        # Waits for events, in order.
        self._watcher = ThreadPool(f"ssd-offload-copies-{device}", 1)
        # The streams of copies out and in, by compute stream.
        self._streams: dict[int, tuple[torch.Stream, torch.Stream]] = {}
        # Owns the memory that paths fill: nothing ever runs on it. Made at its first use.
        self._of_paths: torch.Stream | None = None

    def _copying(self, compute: torch.Stream) -> tuple[torch.Stream, torch.Stream]:
        """Return the streams of copies out and in for a compute stream.

        What one compute stream waits for, such as a reduction, must not hold up another's copies.
        """
        streams = self._streams.get(compute.stream_id)
        if streams is None:
            made = torch.Stream(self.device), torch.Stream(self.device)
            streams = self._streams.setdefault(compute.stream_id, made)
        return streams

    # ------------------------------------------------------------------ to the host
    def copy_out(
        self,
        entries: Sequence[Entry],
        sources: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        compute: torch.Stream | None,
        after: torch.Event | None = None,
    ) -> None:
        """Start to copy entries' flat sources to a host buffer, each to whole pages of its own.

        `copied` is set if that takes time. If others are copied into the buffer, it starts `after`
        the end of that.
        """
        hosts = _parts_of(buffer, entries)
        for entry, host in zip(entries, hosts, strict=True):
            entry.payload = host
        if not self.asynchronous:
            for entry, host, source in zip(entries, hosts, sources, strict=True):
                host.copy_(source)
                entry.source = None
            return
        compute = compute or current_stream(self.device)
        outgoing, _ = self._copying(compute)
        outgoing.wait_event(compute.record_event())
        if after is not None:
            outgoing.wait_event(after)
        begun = torch.Event(self.device, enable_timing=True)
        done = torch.Event(self.device, enable_timing=True)
        with using_stream(outgoing):
            begun.record(outgoing)
            _copy_together(sources, hosts, to_host=True)
            done.record(outgoing)
        for source in sources:
            # Where another stream allocated the memory, that must not use it again too early.
            source.record_stream(compute)
        sizes = [entry.nbytes for entry in entries]
        with self._lock:
            window = self._windows.setdefault(compute.stream_id, ReleaseWindow(compute))
            for entry in entries:
                entry.copied = done
            window.add(done, sum(sizes), CopyOut(entries, hosts, begun, done))
            self._largest = max(self._largest, *sizes)
            self._drop_sources(window.release(self.window_bytes))

    @property
    def window_bytes(self) -> int:
        """Bytes whose copies may be under way before the compute stream waits for the first."""
        return max(_WINDOW_BYTES, 2 * self._largest)

    def _window(self) -> ReleaseWindow[CopyOut] | None:
        """Return the window of this thread's stream, if anything was copied from there."""
        return self._windows.get(current_stream(self.device).stream_id) if self._windows else None

    def source_bytes(self) -> int:
        """Return the bytes of this stream's tensors that are kept until they were copied."""
        return 0 if (window := self._window()) is None else window.nbytes

    def release_sources(self, at_most: int) -> None:
        """Let the compute stream wait for copies until at most so many bytes are referenced."""
        if (window := self._window()) is not None:
            with self._lock:
                self._drop_sources(window.release(at_most))

    def release_source(self, entry: Entry) -> None:
        """Let the stream that computed a source wait for its copy: somebody frees the memory."""
        with self._lock:
            for window in self._windows.values():
                if any(entry in copy.entries for copy in window):
                    self._drop_sources(window.release())

    def collect(self) -> None:
        """Drop what copies that are over have kept alive, without waiting."""
        with self._lock:
            while self._loads and self._loads[0][0].query():
                self._loads.popleft()
            for window in self._windows.values():
                self._drop_sources(window.release_unused())
            if (window_here := self._window()) is not None:
                entries = itertools.chain.from_iterable(copy.entries for copy in window_here)
                if any(entry.state is TicketState.FREED for entry in entries):
                    # Backward has used these: nobody else will ever ask for their memory.
                    self._drop_sources(window_here.release())
            while self._released and self._released[0].done.query():
                copy = self._released.popleft()
                nbytes = sum(entry.nbytes for entry in copy.entries)
                self.outgoing.add(nbytes, elapsed_seconds(copy.begun, copy.done))
                for entry in copy.entries:
                    entry.copied = None

    def _drop_sources(self, copies: Sequence[CopyOut]) -> None:
        for copy in copies:
            for entry in copy.entries:
                entry.source = None
        self._released.extend(copies)

    def wait_for_oldest(self) -> bool:
        """Wait for a copy that keeps a host buffer; return False if there is none."""
        with self._lock:
            events = [event for event, _, _ in self._loads] + [c.done for c in self._copies_out()]
        waiting = next((event for event in events if not event.query()), None)
        if waiting is not None:
            waiting.synchronize()
        self.collect()
        return waiting is not None

    def _copies_out(self) -> list[CopyOut]:
        return [*self._released, *(copy for window in self._windows.values() for copy in window)]

    def when_copied(self, event: torch.Event, moves: Sequence[Move]) -> None:
        """Submit moves on a thread at an event; their memory lives until then."""
        kept = [move.keep_alive for move in moves]

        def when_reached(device: torch.device | None = self.device, _: object = kept) -> None:
            if device is not None:  # or events that die on this thread give device 0 a context
                torch.accelerator.set_device_index(device)
            with suppress(RuntimeError):  # a failure of the device is told by training's next call
                while not event.query():  # `synchronize` takes a core: CUDA's events spin
                    time.sleep(_POLL_SECONDS)
            for move in moves:
                move.submit()

        try:
            self._watcher.submit(when_reached)
        except RuntimeError:  # out of threads: the caller waits
            when_reached(None)

    def ready(self, compute: torch.Stream | None = None) -> torch.Event:
        """Return an event after everything that the compute stream was given so far."""
        return (compute or current_stream(self.device)).record_event()

    def may_overwrite(self, host: torch.Tensor, compute: torch.Stream | None) -> bool:
        """Return whether a stream has waited for all copies of a host buffer to the device.

        Then what it computes next can be copied there, although none of that has happened yet.
        """
        if not self.asynchronous:
            return True
        stream, address = (compute or current_stream(self.device)).stream_id, host.data_ptr()
        with self._lock:
            return all(
                stream in copy.awaited_by
                for _, copies, hosts in self._loads
                for copy, each in zip(copies, hosts, strict=True)
                if each.data_ptr() == address
            )

    # ------------------------------------------------------------------ to the device
    def load(
        self, hosts: Sequence[torch.Tensor], after: Sequence[torch.Event | None]
    ) -> list[DeviceCopy]:
        """Start to copy buffers to the device, each after the copy into it, if any; see `adopt`."""
        compute = current_stream(self.device)
        tensors = [
            torch.empty(host.numel(), dtype=torch.uint8, device=self.device) for host in hosts
        ]
        _, incoming = self._copying(compute)
        incoming.wait_event(compute.record_event())
        for event in filter(None, dict.fromkeys(after)):
            incoming.wait_event(event)
        done = torch.Event(self.device)
        with using_stream(incoming):
            _copy_together(tensors, hosts, to_host=False)
            done.record(incoming)
        awaited_by: set[int] = set()
        copies = [DeviceCopy(each, done, compute.stream_id, awaited_by) for each in tensors]
        with self._lock:
            # The incoming stream writes the memory until then, whoever drops the copies.
            self._loads.append((done, copies, hosts))
        return copies

    def keep(self, sources: Sequence[tuple[Entry, torch.Tensor]]) -> None:
        """Keep the sources of copies to the host for the next use, whatever frees the windows."""
        compute = current_stream(self.device)
        now, stream = compute.record_event(), compute.stream_id
        for entry, source in sources:
            entry.staged = DeviceCopy(source, now, stream, {stream})

    def adopt(self, copy: DeviceCopy) -> torch.Tensor:
        """Return the tensor of a copy, for the current stream."""
        compute = current_stream(self.device)
        stream = compute.stream_id
        if stream not in copy.awaited_by:
            compute.wait_event(copy.done)
            copy.awaited_by.add(stream)
        # This stream waits for the copy: it may free the memory at any time from now on.
        tensor, copy.tensor = copy.tensor, None
        assert tensor is not None
        if stream != copy.allocated_by:
            tensor.record_stream(compute)
        return tensor

    def incoming(self, nbytes: int) -> torch.Tensor:
        """Return device memory for a path that fills it directly; its user records its stream."""
        # A path waits for no stream. What the stream of the copies has freed, it may still use.
        if self._of_paths is None:
            self._of_paths = torch.Stream(self.device)
        with using_stream(self._of_paths):
            # `torch.empty` fills it where algorithms are to be deterministic, and no stream orders
            # that before the bytes of the path.
            memory = torch.UntypedStorage(nbytes, device=self.device)
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory)

    def end_threads(self) -> None:
        """End the thread; it starts again on demand."""
        self._watcher.end_threads()

    def close(self) -> None:
        """Wait for all copies; after that the memory at both ends may be freed."""
        self._watcher.close()
        with self._lock:
            for copy in self._copies_out():
                copy.done.synchronize()
                for entry in copy.entries:
                    entry.source = entry.copied = None
            for event, _, _ in self._loads:
                event.synchronize()
            self._released.clear()
            self._windows.clear()
            self._loads.clear()


def sizes_in_buffer(entries: Sequence[Entry]) -> list[int]:
    """Return the bytes of entries in a buffer: whole pages for each of several."""
    if len(entries) == 1:
        return [entries[0].nbytes]
    return [round_up(entry.nbytes, PAGE_BYTES) for entry in entries]


def _parts_of(buffer: torch.Tensor, entries: Sequence[Entry]) -> list[torch.Tensor]:
    """Divide a buffer among entries."""
    if len(entries) == 1:
        return [buffer]
    sizes = sizes_in_buffer(entries)
    parts = zip(buffer.split(sizes), sizes, entries, strict=True)
    return [p if e.nbytes == size else p[: e.nbytes] for p, size, e in parts]


# ---------------------------------------------------------------------- many small tensors
def _copy_together(
    tensors: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor], *, to_host: bool
) -> None:
    """Copy flat tensors of a device to the host, or from there, on the current stream."""
    pairs = zip(tensors, hosts, strict=True)
    for _, group in itertools.groupby(pairs, lambda pair: pair[1].untyped_storage()._cdata):
        mine, others = zip(*group, strict=True)
        whole = _range_of(others)
        staging = None if whole is None else _staging(whole.numel(), mine[0].device)
        if whole is None or staging is None:
            for tensor, host in zip(mine, others, strict=True):
                target, source = (host, tensor) if to_host else (tensor, host)
                target.copy_(source, non_blocking=True)
            continue
        first = whole.storage_offset()
        parts = [staging.narrow(0, h.storage_offset() - first, h.numel()) for h in others]
        if to_host:
            torch._foreach_copy_(parts, mine)
            whole.copy_(staging, non_blocking=True)
        else:
            staging.copy_(whole, non_blocking=True)
            torch._foreach_copy_(mine, parts)


def _range_of(hosts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return what of their buffer covers hosts, if they are many and lie together."""
    if len(hosts) < _MANY:
        return None
    sizes, begins = [host.numel() for host in hosts], [host.storage_offset() for host in hosts]
    first = min(begins)
    nbytes = max(map(operator.add, begins, sizes)) - first
    if nbytes > min(_STAGING_BYTES, _MOST_SPREAD * sum(sizes)):
        return None
    whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    whole.set_(hosts[0].untyped_storage(), first, (nbytes,), (1,))
    return whole


def _staging(nbytes: int, device: torch.device) -> torch.Tensor | None:
    """Return a buffer of the current stream, or None if the device has no memory for it."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


class CopyEngines(dict[torch.device, CopyEngine]):
    """The copy engine of each device, made at its first use; any thread may do so."""

    def __missing__(self, device: torch.device) -> CopyEngine:
        return self.setdefault(device, CopyEngine(device))
