"""The lanes of a replay: what waits for a path, and what it moves at the moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from offload_strategy.plan_runtime.profile import PathRates


@dataclass(eq=False, slots=True)
class Job:
    """Bytes that go over a path.

    Args:
        what: for pictures.
        nbytes: of it.
        write: to the path; else from it.
        done: called when it is over.
        begins: called when it begins.
        may_begin: asked before; None for always.
        cancelled: it is not wanted any more.
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
    """For pictures: what a lane did, and when.

    Args:
        lane: its name.
        what: it moved or computed.
        begin: seconds.
        end: likewise.
        nbytes: moved.
    """

    lane: str
    what: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass(eq=False)
class Lane:
    """One direction of a path, or both of them where they share their time. First in, first out.

    Args:
        name: of it.
        rates: of its path.
    """

    name: str
    rates: PathRates
    waiting: deque[Job] = field(default_factory=deque)
    busy: bool = False
    moved_bytes: int = 0
    busy_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def next(self) -> Job | None:
        """The job to begin now, or None."""
        while self.waiting and self.waiting[0].cancelled:
            self.waiting.popleft()
        if self.busy or not self.waiting:
            return None
        head = self.waiting[0]
        if head.may_begin is not None and not head.may_begin():
            # A read without room must not hold up a write that would make some.
            head = next((job for job in self.waiting if job.may_begin is None), head)
            if head.may_begin is not None:
                return None
            self.waiting.remove(head)
            return None if head.cancelled else head
        return self.waiting.popleft()

    def hurry(self, job: Job) -> None:
        """Let a job that waits be the next one, whether there is room for it or not."""
        job.may_begin = None
        if job in self.waiting:
            self.waiting.remove(job)
            self.waiting.appendleft(job)

    def seconds(self, job: Job) -> float:
        """What a job takes."""
        rate = self.rates.write if job.write else self.rates.read
        return self.rates.latency + job.nbytes / rate


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What a lane did in a step: bytes, and the share of the time for which it was busy."""

    nbytes: int
    busy_share: float


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step as it will be.

    Args:
        step_seconds: from its begin to the begin of the next.
        computing_seconds: in which training computed.
        stalls: seconds that it waited for: "reads", "memory" and "updates".
        peak_bytes: in memory at most.
        lanes: each direction of each path by name, and "update".
        memory: (seconds, bytes), from moment to moment.
        spans: what each lane did.
    """

    step_seconds: float
    computing_seconds: float
    stalls: Mapping[str, float]
    peak_bytes: int
    lanes: Mapping[str, LaneUse]
    memory: Sequence[tuple[float, int]]
    spans: Sequence[Span]
