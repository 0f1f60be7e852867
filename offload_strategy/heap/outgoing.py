"""Copies from a device to host buffers that are still under way."""

from __future__ import annotations

import threading
from collections import deque

import torch

from offload_strategy.heap.ticket import Entry


class OutgoingCopies:
    """Keeps both ends of each copy alive until its event, whatever happens to the ticket.

    A ticket may be freed while its copy still runs. Its device memory must not be reused before
    the copy has read it, nor its host buffer lent to another before the copy has written it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[
            tuple[torch.Event, Entry, torch.Tensor | None, torch.Tensor | None]
        ] = deque()

    def add(self, event: torch.Event, entry: Entry) -> None:
        """Note a copy of `entry.source` into `entry.payload` that ends with `event`."""
        with self._lock:
            self._under_way.append((event, entry, entry.source, entry.payload))

    def let_go(self) -> None:
        """Release the device memory of copies that are over; asks, never waits."""
        if not self._under_way:
            return
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                _, entry, _, _ = self._under_way.popleft()
                entry.source = None

    def wait(self) -> None:
        """Wait until every copy is over; the memory at both ends may go after this."""
        with self._lock:
            while self._under_way:
                event, entry, _, _ = self._under_way.popleft()
                event.synchronize()
                entry.source = None
