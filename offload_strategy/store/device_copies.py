"""Copies between devices and host buffers, and the copies from a device that are in flight."""

from __future__ import annotations

import threading
from collections import deque

import torch

from offload_strategy.store.device_streams import DeviceCopier
from offload_strategy.store.ticket import Entry


class DeviceCopies:
    """One copier for each device; keeps both ends of a copy alive until its event.

    A ticket may be freed while its copy runs. Its device memory must not be reused before the copy
    has read it, and its host buffer must not be acquired again before the copy has written it.
    """

    def __init__(self) -> None:
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._lock = threading.Lock()
        self._in_flight: deque[
            tuple[torch.Event, Entry, torch.Tensor | None, torch.Tensor | None]
        ] = deque()

    def copier(self, device: torch.device) -> DeviceCopier:
        """Return the copier of a device, made at its first use."""
        copier = self._copiers.get(device)
        if copier is None:
            copier = self._copiers[device] = DeviceCopier(device)
        return copier

    def copy_out(self, entry: Entry, payload: torch.Tensor, host: torch.Tensor) -> None:
        """Start to copy a device tensor into the host buffer that becomes the entry's payload."""
        event = self.copier(payload.device).copy_out(payload, host)
        entry.payload = host
        if event is not None:
            entry.source, entry.copied = payload, event
            with self._lock:
                self._in_flight.append((event, entry, payload, host))

    def release_written(self) -> None:
        """Release the device memory of copies that have ended, without waiting."""
        if not self._in_flight:
            return
        with self._lock:
            while self._in_flight and self._in_flight[0][0].query():
                _, entry, _, _ = self._in_flight.popleft()
                entry.source = entry.copied = None

    def wait(self) -> None:
        """Wait for the end of all copies; after that the memory at both ends may be freed."""
        with self._lock:
            while self._in_flight:
                event, entry, _, _ = self._in_flight.popleft()
                event.synchronize()
                entry.source = entry.copied = None
