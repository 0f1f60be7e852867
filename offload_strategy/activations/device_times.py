"""When a device saved and used the items of a forward pass, on the device's own clock.

[Note: clocks]
The host launches operations before the device executes them, so the host's clock says nothing about
when a tensor exists, or when it is needed. On an accelerator a pass is timed by events, which the
device signals and which the host reads later, without waiting. As each event costs the launching
thread a few microseconds, the first passes are timed and then one of many: a device repeats itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Passes that are timed at first, and then one of so many.
_FIRST_PASSES, _ONE_OF = 8, 16


def is_timed(serial: int) -> bool:
    """Return whether the forward pass with this number is timed."""
    return serial < _FIRST_PASSES or serial % _ONE_OF == 0


class DeviceTimes:
    """The events of one pass on the device that computes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._saved: list[torch.Event] = []
        self._used: list[torch.Event] = []
        #: (number of uses before it, begin, end) of each time in which the device waited for bytes.
        self._waits: list[tuple[int, torch.Event, torch.Event]] = []

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def saved(self) -> None:
        """Record that an item was saved."""
        self._saved.append(self._event())

    def used(self) -> None:
        """Record the first use of an item."""
        self._used.append(self._event())

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Record when the compute stream needs bytes, and when it has them."""
        begun = self._event()
        yield
        self._waits.append((len(self._used), begun, self._event()))

    @property
    def over(self) -> bool:
        """Whether the device has reached every event."""
        ends = [end for _, _, end in self._waits[-1:]]
        return all(event.query() for event in [*self._saved[-1:], *self._used[-1:], *ends])

    def saved_after(self) -> list[float]:
        """Return the seconds from the first save to each."""
        return [_elapsed(self._saved[0], event) for event in self._saved]

    def used_after(self) -> list[tuple[float, float]]:
        """Return for each use the seconds since the first save, and how long was waited so far."""
        waits = deque((place, _elapsed(begin, end)) for place, begin, end in self._waits)
        waited, found = 0.0, []
        for number, event in enumerate(self._used):
            while waits and waits[0][0] <= number:
                waited += waits.popleft()[1]
            found.append((_elapsed(self._saved[0], event), waited))
        return found

    def waited(self) -> float:
        """Return the seconds for which the device waited for bytes in backward."""
        return sum(_elapsed(begin, end) for _, begin, end in self._waits)


def _elapsed(begin: torch.Event, end: torch.Event) -> float:
    return max(0.0, begin.elapsed_time(end) / 1000)
