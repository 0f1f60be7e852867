"""A discrete-event simulation of a step with offload: computation, transfers and their waits.

[Note: the simulation]
Training passes the events of a profile in order: a tensor is created, used, may be offloaded,
should be fetched; baseline memory grows or shrinks; the gradients of an update are final. Between
two events it computes. It waits for a tensor that is not back, for memory if the limit is reached
and a write is in flight, and at the end of the step for updates. Each direction of the path runs
one transfer at a time, first in, first out; transfers that training waits for overtake others.
States of the optimizer are prefetched from the start of backward, updated and written concurrently.
Each of training, an update, and the way of a tensor out and back is a process: a generator that
yields what it waits for.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, least_room
from offload_strategy.plan_runtime.profile import Profile, TensorLife, Update

#: Updates whose states are read, computed or written at the same time (Fuyou, section 4.2).
_BUFFERS = 3


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
    memory: tuple[tuple[float, int], ...] = ()  # (seconds, bytes from then on)


@dataclass(eq=False, slots=True)
class _Transfer:
    """A transfer over a path."""

    nbytes: int
    write: bool
    takes: int = 0  # Bytes of memory that must be free when it begins, unless it is urgent
    urgent: bool = False  # Whether training waits for it
    process: _Process = field(init=False)  # Goes on at its end


#: Yields the seconds until it goes on, the transfer at whose end it does, or None to be asked again
#: after whatever happens next.
_Process = Iterator[float | _Transfer | None]


@dataclass(eq=False, slots=True)
class _Lane:
    """One direction of the path; first in, first out."""

    name: str
    bytes_per_second: float
    waiting: deque[_Transfer] = field(default_factory=deque)
    busy: bool = False


@dataclass(eq=False, slots=True)
class _Tensor:
    life: TensorLife
    moves: bool
    #: Its write or its read that is queued or in flight.
    transfer: _Transfer | None = None
    away: bool = False
    wanted: bool = False
    #: Whether training references the memory otherwise, and whether only that keeps it.
    held: bool = False
    lingers: bool = False

    @property
    def leaving(self) -> bool:
        return self.transfer is not None and self.transfer.write


#: Time within the step, and what happens, which yields the cause of each wait before that.
_Event = tuple[float, Callable[[], Iterable[str] | None]]


def replay(profile: Profile, plan: LifetimePlan | None = None, *, steps: int = 3) -> StepReplay:
    """Replay a step in the middle of training, on the path of its profile.

    Without a plan only the states of updates move. The result is the last of the simulated steps,
    in the steady state.
    """
    return _Replay(profile, plan).run(max(1, steps))


class _Replay:
    def __init__(self, profile: Profile, plan: LifetimePlan | None) -> None:
        self._profile = profile
        self._limit = math.inf if plan is None else plan.limit
        self._least_room = 0 if plan is None else least_room(plan.limit)
        self._now = 0.0
        self._serial = itertools.count()
        self._events: list[tuple[float, int, _Process]] = []
        self._waiting: list[_Process] = []
        #: Lanes by whether they write; empty without a path.
        self._lanes: dict[bool, _Lane] = {}
        for path in profile.paths:
            self._lanes[False] = _Lane(f"{path.name} read", path.read)
            self._lanes[True] = _Lane(f"{path.name} write", path.write)
        self._fetches = {move.tensor: move.fetch_at for move in (plan.moves if plan else ())}
        self._tensors = [
            _Tensor(life, number in self._fetches) for number, life in enumerate(profile.tensors)
        ]
        self._memory = self._baseline = profile.baseline[-1][1]
        self._leaving = 0  # bytes whose write is queued or in flight
        self._held = 0  # buffers of updates whose states are read, in memory or written
        self._delay = 0.0  # delay of computation by transfers and updates
        self._waits = False  # whether training waits
        self._done: StepReplay | None = None

    def run(self, steps: int) -> StepReplay:
        """Simulate so many steps and return the last one."""
        self._resume(self._train(steps))
        while self._done is None:
            if not self._events:
                raise RuntimeError("the replay waits for an event that never happens")
            self._now, _, process = heapq.heappop(self._events)
            self._resume(process)
            waiting, self._waiting = self._waiting, []
            for process in waiting:
                self._resume(process)
        return self._done

    def _resume(self, process: _Process) -> None:
        """Let a process go on until it waits for something."""
        found = next(process, math.inf)
        if isinstance(found, _Transfer):
            found.process = process
            self._lanes[found.write].waiting.append(found)
        # A read that is planned to end just in time must end before the event that needs it.
        self._serve()
        if found is None:
            self._waiting.append(process)
        elif not isinstance(found, _Transfer) and found < math.inf:
            heapq.heappush(self._events, (self._now + found, next(self._serial), process))

    # ------------------------------------------------------------------ training
    def _train(self, steps: int) -> _Process:
        events = self._events_of_a_step()
        for _ in range(steps):
            self._begin_step()
            passed = computing = 0.0
            stalls = dict.fromkeys(("reads", "memory", "updates"), 0.0)
            for at, happen in events:
                seconds = max(0.0, at - passed)
                computing += seconds
                passed = max(at, passed)
                yield seconds
                while self._delay > 0:
                    delay, self._delay = self._delay, 0.0
                    yield delay
                cause, since = None, self._now
                for what in happen() or ():
                    cause, self._waits = cause or what, True
                    yield None
                self._waits = False
                if cause is not None:
                    stalls[cause] += self._now - since
        seconds, busy = self._now - self._began, self._busy.items()
        lanes = {lane: LaneUse(moved, spent / (seconds or 1.0)) for lane, (moved, spent) in busy}
        peak = max(nbytes for _, nbytes in self._curve)
        self._done = StepReplay(seconds, computing, stalls, peak, lanes, tuple(self._curve))

    def _delay_computing(self, seconds: float) -> None:
        """Delay computation; no delay if training waits anyway."""
        if not self._waits:
            self._delay += seconds

    def _events_of_a_step(self) -> list[_Event]:
        """Return the events of a step by their time, and else in the order of this list."""
        profile, step = self._profile, self._profile.step_seconds
        baseline = [profile.baseline[-1], *profile.baseline]
        changes = [
            (min(at, step), now - before) for (_, before), (at, now) in itertools.pairwise(baseline)
        ]
        events: list[_Event] = [
            *((at, partial(self._change_baseline, more)) for at, more in changes if more <= 0),
            *(
                (min(tensor.life.held_until, step), partial(self._release, tensor))
                for tensor in self._tensors
                if tensor.life.held_until > tensor.life.uses[0]
            ),
            *(
                (min(at, step), partial(self._fetch, self._tensors[number]))
                for number, at in self._fetches.items()
            ),
            *(
                (at, partial(happen, tensor))
                for tensor in self._tensors
                for at, happen in zip(tensor.life.uses, (self._create, self._use), strict=True)
            ),
            # A tensor that was just used may be part of it.
            *((at, partial(self._change_baseline, more)) for at, more in changes if more > 0),
            (profile.forward_seconds, self._begin_updates),
            *((min(update.ready_at, step), self._gradients_ready) for update in profile.updates),
            (step, self._end),
        ]
        return sorted(events, key=itemgetter(0))

    # ------------------------------------------------------------------ memory
    def _require(self, nbytes: int) -> Iterator[str]:
        """Take memory, or give it back; wait if there is too little and a write will free some."""
        while nbytes > self._free_bytes() and nbytes > 0 and self._leaving:
            yield "memory"
        self._count(nbytes)

    def _change_baseline(self, nbytes: int) -> Iterator[str]:
        self._baseline += nbytes
        return self._require(nbytes)

    def _free_bytes(self) -> float:
        """Return the bytes that are free; tensors have some even where the limit cannot be kept."""
        return max(self._limit, self._baseline + self._least_room) - self._memory

    def _count(self, nbytes: int) -> None:
        self._memory += nbytes
        self._curve.append((self._now - self._began, self._memory))

    # ------------------------------------------------------------------ tensors
    def _create(self, tensor: _Tensor) -> Iterator[str]:
        yield from self._require(tensor.life.nbytes)
        if tensor.moves:
            self._resume(self._leave(tensor))

    def _leave(self, tensor: _Tensor) -> _Process:
        nbytes = tensor.life.nbytes
        tensor.transfer = write = _Transfer(nbytes, True)
        tensor.held, tensor.wanted = tensor.life.held_until > tensor.life.uses[0], False
        self._leaving += nbytes
        yield write
        self._delay_computing(self._profile.io_overhead * nbytes)
        if tensor.transfer is not write:
            return  # It was used meanwhile.
        tensor.away, tensor.transfer = True, None
        self._leaving -= nbytes
        tensor.lingers = tensor.held
        if not tensor.held:
            self._count(-nbytes)
        if tensor.wanted:
            yield from self._return(tensor)

    def _return(self, tensor: _Tensor) -> _Process:
        nbytes = tensor.life.nbytes
        tensor.away, tensor.transfer = False, _Transfer(nbytes, False, takes=nbytes)
        yield tensor.transfer
        self._delay_computing(self._profile.io_overhead * nbytes)
        tensor.transfer = None

    def _use(self, tensor: _Tensor) -> Iterator[str]:
        """Wait until a tensor is back, if it left, and free it."""
        if tensor.away:
            self._resume(self._return(tensor))
        while tensor.transfer is not None and not tensor.leaving:
            if tensor.transfer in (reads := self._lanes[False].waiting):
                # The next one, whether there is room for it or not.
                tensor.transfer.urgent = True
                reads.remove(tensor.transfer)
                reads.appendleft(tensor.transfer)
            yield "reads"
        if tensor.transfer is not None:  # still in memory: cancel the offload
            with contextlib.suppress(ValueError):  # unless it has begun
                self._lanes[True].waiting.remove(tensor.transfer)
            tensor.transfer = None
            self._leaving -= tensor.life.nbytes
        yield from self._require(-tensor.life.nbytes)

    def _release(self, tensor: _Tensor) -> Iterable[str]:
        """Drop training's own reference to a tensor."""
        tensor.held = False
        if not tensor.lingers:
            return ()
        tensor.lingers = False
        return self._require(-tensor.life.nbytes)

    def _fetch(self, tensor: _Tensor) -> None:
        tensor.wanted = tensor.leaving
        if tensor.away:
            self._resume(self._return(tensor))

    # ------------------------------------------------------------------ updates
    def _end(self) -> Iterator[str]:
        while self._updated < len(self._profile.updates):
            yield "updates"

    def _gradients_ready(self) -> None:
        self._ready += 1

    def _begin_updates(self) -> None:
        self._resume(self._update_all())

    def _update_all(self) -> _Process:
        """Begin the updates in their order, no more at a time than there are buffers."""
        for number, update in enumerate(self._profile.updates):
            while self._held >= _BUFFERS:
                yield None
            self._held += 1
            self._resume(self._update(number, update))

    def _update(self, number: int, update: Update) -> _Process:
        """Read states, update them once their gradients are final and it is their turn, write."""
        if update.read_bytes and self._lanes:
            yield _Transfer(update.read_bytes, False)
        while number >= self._ready or number > self._updated:
            yield None
        self._keep_busy("update", update.seconds)
        if self._profile.shared_cores:
            self._delay_computing(update.seconds)
        yield update.seconds
        self._updated += 1
        if update.written_bytes and self._lanes:
            yield _Transfer(update.written_bytes, True)
        self._held -= 1

    # ------------------------------------------------------------------ lanes
    def _serve(self) -> None:
        """Start the next transfer of each lane that is idle."""
        for lane in self._lanes.values():
            if lane.waiting and not lane.busy:
                transfer: _Transfer | None = lane.waiting[0]
                if lane.waiting[0].takes > self._free_bytes():
                    # For want of room a tensor must not block states, or what training waits for.
                    others = (one for one in lane.waiting if one.urgent or not one.takes)
                    transfer = next(others, None)
                if transfer is not None:
                    self._resume(self._move(lane, transfer))

    def _move(self, lane: _Lane, transfer: _Transfer) -> _Process:
        lane.waiting.remove(transfer)
        lane.busy = True
        self._count(transfer.takes)
        seconds = transfer.nbytes / lane.bytes_per_second
        self._keep_busy(lane.name, seconds, transfer.nbytes)
        yield seconds
        lane.busy = False
        self._resume(transfer.process)

    def _keep_busy(self, lane: str, seconds: float, nbytes: int = 0) -> None:
        moved, busy = self._busy.get(lane, (0, 0.0))
        self._busy[lane] = moved + nbytes, busy + seconds

    # ------------------------------------------------------------------ steps
    def _begin_step(self) -> None:
        self._began = self._now
        self._curve = [(0.0, self._memory)]
        self._busy: dict[str, tuple[int, float]] = {}  # bytes and seconds by lane
        # Updates whose gradients are final, and that have ended (states may still be written).
        self._ready = self._updated = 0
