"""When updates ran, how long they waited for their states, and what they moved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Updates that are remembered: a few steps of many subgroups.
_MOST = 4096


@dataclass(slots=True)
class UpdateTiming:
    """One update; times are of `time.perf_counter`.

    Args:
        begin: it began.
        end: it was over.
        waited: seconds of that for its states.
        read_bytes: of states that it used.
        written_bytes: of states that it left.
    """

    begin: float
    end: float = 0.0
    waited: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0


class Timings:
    """The latest updates, in order."""

    def __init__(self) -> None:
        self._latest: deque[UpdateTiming] = deque(maxlen=_MOST)
        #: Of all updates so far, waiting included.
        self.seconds = 0.0

    @contextmanager
    def update(self) -> Iterator[UpdateTiming]:
        """Time what runs inside; one that fails is not noted."""
        timing = UpdateTiming(time.perf_counter())
        yield timing
        timing.end = time.perf_counter()
        self.seconds += timing.end - timing.begin
        self._latest.append(timing)

    @contextmanager
    def waiting(self, timing: UpdateTiming) -> Iterator[None]:
        """Count what runs inside as waiting for states."""
        begin = time.perf_counter()
        yield
        timing.waited += time.perf_counter() - begin

    def since(self, moment: float) -> list[UpdateTiming]:
        """Those that began after a moment."""
        return [timing for timing in self._latest if timing.begin >= moment]
