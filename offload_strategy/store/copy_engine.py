"""Copies between an accelerator and host buffers, on streams of their own.

[Note: the device is behind the host]
The host launches operations long before the device executes them. So memory must not wait for the
host to see that a copy is over. It is freed in the order of the device instead: after a bounded
number of bytes, the compute stream waits for the copy, and the reference is dropped, although the
device may be far behind; the allocator gives the memory to what the compute stream does later. In
the other direction memory is allocated on the compute stream, and the incoming copy waits until
the device has reached the point at which the host asked for it. So neither direction needs more
device memory than these windows, however far the host is ahead, and the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.store.ticket import DeviceCopy, Entry, TicketState
from offload_strategy.torch_support.accelerator import is_asynchronous, using_stream
from offload_strategy.units import MiB

#: Bytes whose copies to the host may be under way before the compute stream waits for the first,
#: unless two of the largest tensor are more.
_WINDOW_BYTES = 16 * MiB


@dataclass(eq=False, slots=True)
class _CopyOut:
    """A copy to the host, with both ends, which stay alive until it is over."""

    entry: Entry
    source: torch.Tensor | None
    host: torch.Tensor
    done: torch.Event


class CopyEngine:
    """All copies between one device and the host.

    Any thread may call it; the calling thread's current stream is the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = is_asynchronous(device)
        self._lock = threading.Lock()
        self._largest = 0
        # Copies whose source is still referenced, by compute stream: only that stream can wait
        # for them before the memory is used again. Then those whose host buffer is to be kept.
        self._windows: dict[int, deque[_CopyOut]] = defaultdict(deque)
        self._released: deque[_CopyOut] = deque()
        self._loads: deque[tuple[DeviceCopy, torch.Tensor]] = deque()
        # Waits for events, in order.
        self._watcher = ThreadPool(f"ssd-offload-copies-{device}", 1)
        if self.asynchronous:
            self._out, self._in = torch.Stream(device), torch.Stream(device)

    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    # ------------------------------------------------------------------ to the host
    def copy_out(self, entry: Entry, payload: torch.Tensor, host: torch.Tensor) -> None:
        """Start to copy a payload to a host buffer, which becomes the payload of the entry.

        `entry.copied` is set if the copy is not over when this returns.
        """
        entry.payload = host
        if not self.asynchronous:
            host.copy_(payload)
            return
        compute = self._compute()
        self._out.wait_event(compute.record_event())
        with using_stream(self._out):
            host.copy_(payload, non_blocking=True)
            done = torch.Event(self.device, blocking=True)
            done.record(self._out)
        # Where another stream allocated the memory, that stream must not use it again too early.
        payload.record_stream(compute)
        with self._lock:
            entry.source, entry.copied = payload, done
            self._windows[compute.stream_id].append(_CopyOut(entry, payload, host, done))
            self._largest = max(self._largest, payload.numel())
            self._release_sources(compute, max(_WINDOW_BYTES, 2 * self._largest))

    def source_bytes(self) -> int:
        """Return the bytes of this stream's tensors that are kept until they were copied."""
        if not self.asynchronous:
            return 0
        with self._lock:
            window = self._windows[self._compute().stream_id]
            return sum(copy.host.numel() for copy in window)

    def release_sources(self, at_most: int) -> None:
        """Let the compute stream wait for copies until at most so many bytes are referenced."""
        if self.asynchronous:
            with self._lock:
                self._release_sources(self._compute(), at_most)

    def collect(self) -> None:
        """Drop what copies that are over have kept alive, without waiting."""
        if not self.asynchronous:
            return
        with self._lock:
            while self._loads and self._loads[0][0].done.query():
                self._loads.popleft()
            for window in self._windows.values():
                while window and window[0].done.query():
                    self._release(window.popleft())
            while self._released and self._released[0].done.query():
                self._released.popleft().entry.copied = None
            window = self._windows[self._compute().stream_id]
            if any(copy.entry.state is TicketState.FREED for copy in window):
                # Backward has used these: nobody else will ever ask for their memory.
                self._release_sources(self._compute(), 0)

    def _release_sources(self, compute: torch.Stream, at_most: int) -> None:
        window = self._windows[compute.stream_id]
        nbytes = sum(copy.host.numel() for copy in window)
        released = []
        while window and nbytes > at_most:
            released.append(window.popleft())
            nbytes -= released[-1].host.numel()
        if released:
            # The outgoing stream ends its copies in order. First the wait, then the release: what
            # is freed may be overwritten by whatever the compute stream does next.
            compute.wait_event(released[-1].done)
        for copy in released:
            self._release(copy)

    def _copies_out(self) -> list[_CopyOut]:
        return [*self._released, *(copy for window in self._windows.values() for copy in window)]

    def _release(self, copy: _CopyOut) -> None:
        copy.entry.source = copy.source = None
        self._released.append(copy)

    def wait_for_oldest(self) -> bool:
        """Wait for a copy that keeps a host buffer; return False if there is none."""
        if not self.asynchronous:
            return False
        with self._lock:
            events = [load.done for load, _ in self._loads] + [c.done for c in self._copies_out()]
        waiting = next((event for event in events if not event.query()), None)
        if waiting is not None:
            waiting.synchronize()
        self.collect()
        return waiting is not None

    def when_copied(self, event: torch.Event, kept: object, then: Callable[[], None]) -> None:
        """Call `then`, which must not raise, on another thread once the device reaches an event.

        The event waits without spinning; `kept` stays alive until then.
        """

        def when_reached(_: object = kept) -> None:
            event.synchronize()
            then()

        self._watcher.submit(when_reached)

    def ready(self) -> torch.Event:
        """Return an event after everything that the compute stream was given so far."""
        event = torch.Event(self.device, blocking=True)
        event.record(self._compute())
        return event

    # ------------------------------------------------------------------ to the device
    def load(self, host: torch.Tensor, after: torch.Event | None) -> DeviceCopy:
        """Start to copy a host buffer, which must not change, to the device; `adopt` the copy.

        `after` is the end of a copy into this buffer, or None.
        """
        compute = self._compute()
        tensor = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        self._in.wait_event(compute.record_event())
        if after is not None:
            self._in.wait_event(after)
        with using_stream(self._in):
            tensor.copy_(host, non_blocking=True)
            done = torch.Event(self.device)
            done.record(self._in)
        copy = DeviceCopy(tensor, done)
        with self._lock:
            # The incoming stream writes the memory until then, whoever drops the copy.
            self._loads.append((copy, host))
        return copy

    def adopt(self, copy: DeviceCopy) -> torch.Tensor:
        """Return the tensor of a copy, for the current stream."""
        compute = self._compute()
        compute.wait_event(copy.done)
        # This stream waits for the copy: it may free the memory at any time from now on.
        tensor, copy.tensor = copy.tensor, None
        assert tensor is not None
        tensor.record_stream(compute)
        return tensor

    def incoming(self, nbytes: int) -> torch.Tensor:
        """Return device memory for a path that fills it directly; see `adopt_incoming`."""
        with using_stream(self._in):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def adopt_incoming(self, loaded: torch.Tensor) -> torch.Tensor:
        """Tell the allocator that the current stream uses memory of `incoming`."""
        loaded.record_stream(self._compute())
        return loaded

    def end_threads(self) -> None:
        """End the thread; it starts again on demand."""
        self._watcher.end_threads()

    def close(self) -> None:
        """Wait for all copies; after that the memory at both ends may be freed."""
        self._watcher.close()
        with self._lock:
            for copy in self._copies_out():
                copy.done.synchronize()
                copy.entry.source = copy.entry.copied = None
            for load, _ in self._loads:
                load.done.synchronize()
            self._released.clear()
            self._windows.clear()
            self._loads.clear()


class CopyEngines:
    """The copy engine of each device, made at its first use."""

    def __init__(self) -> None:
        self._engines: dict[torch.device, CopyEngine] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> CopyEngine:
        """Return the engine of a device."""
        engine = self._engines.get(device)
        if engine is None:
            with self._lock:
                engine = self._engines.setdefault(device, CopyEngine(device))
        return engine

    def collect(self) -> None:
        """See `CopyEngine.collect`."""
        for engine in tuple(self._engines.values()):
            engine.collect()

    def source_bytes(self) -> int:
        """See `CopyEngine.source_bytes`."""
        return sum(engine.source_bytes() for engine in tuple(self._engines.values()))

    def release_sources(self, at_most: int) -> None:
        """See `CopyEngine.release_sources`."""
        for engine in tuple(self._engines.values()):
            engine.release_sources(at_most)

    def wait_for_oldest(self) -> bool:
        """See `CopyEngine.wait_for_oldest`."""
        return any([engine.wait_for_oldest() for engine in tuple(self._engines.values())])

    def end_threads(self) -> None:
        """See `CopyEngine.end_threads`."""
        for engine in tuple(self._engines.values()):
            engine.end_threads()

    def close(self) -> None:
        """See `CopyEngine.close`."""
        for engine in self._engines.values():
            engine.close()
