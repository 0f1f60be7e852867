"""The lanes of a replay: queued and running transfers of each direction of a path."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from offload_strategy.plan_runtime.profile import PathRates


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer over a path.

    Args:
        what: Name for charts.
        nbytes: Size in bytes.
        write: Whether it is a write; otherwise it is a read.
        done: Called at its end.
        begins: Called at its start.
        may_begin: Asked before its start; None for always.
        cancelled: Whether it is no longer needed.
    """

    what: str
    nbytes: int
    write: bool
    done: Callable[[], None]
    begins: Callable[[], None] | None = None
    may_begin: Callable[[], bool] | None = None
    cancelled: bool = False
    begun: bool = False


@dataclass(slots=True)
class Span:
    """What a lane did in a span of time, for charts.

    Args:
        lane: Name of the lane.
        what: Name of what it moved or computed.
        begin: Start in seconds.
        end: End in seconds.
        nbytes: Moved bytes.
    """

    lane: str
    what: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass(eq=False)
class Lane:
    """One direction of a path, or both if they share its time; first in, first out.

    Args:
        name: Name of the lane.
        rates: Rates of its path.
    """

    name: str
    rates: PathRates
    waiting: deque[Transfer] = field(default_factory=deque)
    busy: bool = False
    moved_bytes: int = 0
    busy_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def next(self) -> Transfer | None:
        """Return the transfer to start now, or None."""
        while self.waiting and self.waiting[0].cancelled:
            self.waiting.popleft()
        if self.busy or not self.waiting:
            return None
        head = self.waiting[0]
        if head.may_begin is not None and not head.may_begin():
            # A read without room must not block a write that would free some.
            head = next((job for job in self.waiting if job.may_begin is None), head)
            if head.may_begin is not None:
                return None
            self.waiting.remove(head)
            return None if head.cancelled else head
        return self.waiting.popleft()

    def prioritize(self, job: Transfer) -> None:
        """Make a queued transfer the next one, whether there is room for it or not."""
        job.may_begin = None
        if job in self.waiting:
            self.waiting.remove(job)
            self.waiting.appendleft(job)

    def seconds(self, job: Transfer) -> float:
        """Return the seconds of a transfer."""
        rate = self.rates.write if job.write else self.rates.read
        return self.rates.latency + job.nbytes / rate


@dataclass(frozen=True, slots=True)
class LaneUse:
    """Use of a lane in a step.

    Args:
        nbytes: Moved bytes.
        busy_share: Share of the step in which the lane was busy.
    """

    nbytes: int
    busy_share: float


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The predicted course of a step.

    Args:
        step_seconds: Seconds from its start to the start of the next step.
        computing_seconds: Seconds in which training computed.
        stalls: Seconds of waiting for "reads", "memory" and "updates".
        peak_bytes: Peak memory.
        lanes: Use of each direction of each path by name, and of "update".
        memory: Memory over time as (seconds, bytes).
        spans: What each lane did.
    """

    step_seconds: float
    computing_seconds: float
    stalls: Mapping[str, float]
    peak_bytes: int
    lanes: Mapping[str, LaneUse]
    memory: Sequence[tuple[float, int]]
    spans: Sequence[Span]
