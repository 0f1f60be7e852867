"""When a device saved and used the items of a forward pass, on the device's own clock.

[Note: clocks]
The host launches operations before the device executes them, so the host's clock says nothing about
when a tensor exists, or when it is needed. On an accelerator a pass is timed by events, which the
device signals and which the host reads later, without waiting. As each event costs the launching
thread a few microseconds, the first passes are timed and then one of many: a device repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from offload_strategy.torch_support.accelerator import elapsed_seconds

#: Passes that are timed at first, and then one of so many.
_FIRST_PASSES, _ONE_OF = 8, 16


class DeviceEvents:
    """The events of the forward or the backward of a pass on the device that computes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Each save, or each first use, and the number of waits before it.
        self.items: list[tuple[torch.Event, int]] = []
        #: Begin and end of each time in which the compute stream waited.
        self._waits: list[tuple[torch.Event, torch.Event]] = []

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def note(self) -> None:
        """Record that an item was saved, or used first."""
        self.items.append((self._event(), len(self._waits)))

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Record when the compute stream could go on, and when copies or missing bytes let it."""
        begun = self._event()
        yield
        self._waits.append((begun, self._event()))

    @property
    def over(self) -> bool:
        """Whether the device has reached every event."""
        known = (event for event, _ in reversed(self.items))
        # All of them: a pass may have several streams, of which each keeps its own order.
        return all(event.query() for event in chain(known, (end for _, end in self._waits)))

    def since(self, first: torch.Event) -> tuple[list[tuple[float, float]], float]:
        """Return the seconds from an event to each item, and those of waits before that item.

        Last are the seconds of all waits.
        """
        waited = list(accumulate((elapsed_seconds(*wait) for wait in self._waits), initial=0.0))
        times = [(elapsed_seconds(first, event), waited[before]) for event, before in self.items]
        return times, waited[-1]


class DeviceTimes(NamedTuple):
    """The events of a pass: saves and holds in forward, first uses and waits in backward."""

    forward: DeviceEvents
    backward: DeviceEvents

    @classmethod
    def of_pass(cls, serial: int, device: torch.device) -> DeviceTimes | None:
        """Return those of the pass with this number, or None if it is not timed."""
        timed = serial < _FIRST_PASSES or serial % _ONE_OF == 0
        return cls(DeviceEvents(device), DeviceEvents(device)) if timed else None
