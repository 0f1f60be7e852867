"""When a device saved and used the items of a forward pass, on the device's own clock.

[Note: clocks]
The host launches operations before the device executes them, so the host's clock says nothing about
when a tensor exists, or when it is needed. On an accelerator a pass is timed by events, which the
device signals and which the host reads later, without waiting. As each event costs the launching
thread a few microseconds, the first passes are timed and then one of many: a device repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate, chain

import torch

from offload_strategy.torch_support.accelerator import elapsed_seconds

#: Passes that are timed at first, and then one of so many.
_FIRST_PASSES, _ONE_OF = 8, 16


def is_timed(serial: int) -> bool:
    """Return whether the forward pass with this number is timed."""
    return serial < _FIRST_PASSES or serial % _ONE_OF == 0


class DeviceTimes:
    """The events of one pass on the device that computes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: Each save, and the number of holds before it.
        self._saved: list[tuple[torch.Event, int]] = []
        #: Begin and end of each time in which forward was held until copies to the host were over.
        self._holds: list[tuple[torch.Event, torch.Event]] = []
        #: Each first use, and the number of waits before it.
        self._used: list[tuple[torch.Event, int]] = []
        #: Begin and end of each time in which the device waited for bytes.
        self._waits: list[tuple[torch.Event, torch.Event]] = []

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def saved(self) -> None:
        """Record that an item was saved."""
        self._saved.append((self._event(), len(self._holds)))

    def used(self) -> None:
        """Record the first use of an item."""
        self._used.append((self._event(), len(self._waits)))

    def hold(self) -> AbstractContextManager[None]:
        """Record when the compute stream could go on, and when copies to the host let it."""
        return self._timed(self._holds)

    def wait(self) -> AbstractContextManager[None]:
        """Record when the compute stream needs bytes, and when it has them."""
        return self._timed(self._waits)

    @contextmanager
    def _timed(self, times: list[tuple[torch.Event, torch.Event]]) -> Iterator[None]:
        begun = self._event()
        yield
        times.append((begun, self._event()))

    @property
    def over(self) -> bool:
        """Whether the device has reached every event."""
        known = (event for event, _ in chain(reversed(self._saved), self._used))
        ends = (end for _, end in chain(self._holds, self._waits))
        # All of them: a pass may have several streams, of which each keeps its own order.
        return all(event.query() for event in chain(known, ends))

    def elapsed(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]], float, float]:
        """Return the seconds from the first save to each save and to each use.

        With each save are the seconds for which forward was held until then, with each use those
        for which the device had waited for bytes; last the seconds of all holds and of all waits.
        """
        first, _ = self._saved[0]
        held, waited = _sums(self._holds), _sums(self._waits)
        saved = [(elapsed_seconds(first, event), held[holds]) for event, holds in self._saved]
        used = [(elapsed_seconds(first, event), waited[waits]) for event, waits in self._used]
        return saved, used, held[-1], waited[-1]


def _sums(pairs: Sequence[tuple[torch.Event, torch.Event]]) -> list[float]:
    return list(accumulate((elapsed_seconds(*pair) for pair in pairs), initial=0.0))
