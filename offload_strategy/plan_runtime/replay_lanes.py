"""What a replay consists of: the lanes of the path with their transfers, and the replayed step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offload_strategy.plan_runtime.profile import PathRates


@dataclass(frozen=True, slots=True)
class LaneUse:
    """The bytes that a lane moved in a step, and the share of the step in which it was busy."""

    nbytes: int
    busy_share: float


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The predicted course of a step."""

    step_seconds: float  # From its start to the start of the next step
    computing_seconds: float
    stalls: Mapping[str, float]  # Seconds of waiting for "reads", "memory" and "updates"
    peak_bytes: int
    lanes: Mapping[str, LaneUse]  # Of each direction of the path by name, and of "update"


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer over a path; `done` is called at its end.

    A transfer that `takes` memory begins only when there is room for so many bytes, unless training
    waits for it and it is `urgent`.
    """

    nbytes: int
    write: bool
    done: Callable[[], None]
    takes: int = 0
    urgent: bool = False
    cancelled: bool = False
    begun: bool = False


@dataclass(eq=False, slots=True)
class Lane:
    """One direction of the path; first in, first out."""

    name: str
    rates: PathRates
    waiting: deque[Transfer] = field(default_factory=deque)
    busy: bool = False

    def next(self, room: float) -> Transfer | None:
        """Take the transfer that starts now from the queue, if so many bytes of memory are free."""
        while self.waiting and self.waiting[0].cancelled:
            self.waiting.popleft()
        if self.busy or not self.waiting:
            return None
        # A read without room must not block a write that would free some.
        fits = (one for one in self.waiting if one.urgent or not one.takes)
        head = self.waiting[0]
        found = head if head.takes <= room else next(fits, None)
        if found is None:
            return None
        self.waiting.remove(found)
        return None if found.cancelled else found

    def prioritize(self, transfer: Transfer) -> None:
        """Make a queued transfer the next one, whether there is room for it or not."""
        transfer.urgent = True
        if transfer in self.waiting:
            self.waiting.remove(transfer)
            self.waiting.appendleft(transfer)
