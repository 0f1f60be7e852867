"""A discrete-event simulation of a step with offload: computation, transfers and their waits.

[Note: the simulation]
Training passes the events of a profile in order: a tensor is created, used, may be offloaded,
should be fetched; baseline memory grows or shrinks; the gradients of an update are final. Between
two events it computes. It waits for a tensor that is not back, for memory if the limit is reached
and a write is in flight, and at the end of the step for updates. Each direction of a path runs one
transfer at a time, first in, first out; transfers that training waits for overtake others.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from offload_strategy.plan_runtime.lifetime_plan import HOST, HostRoom, LifetimePlan, PlannedMove
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay_lanes import Lane, LaneUse, Span, StepReplay, Transfer
from offload_strategy.plan_runtime.replay_optimizer import Updates


class _Kind(IntEnum):
    """Kinds of events, in the order in which simultaneous ones are passed."""

    LESS = 0  # baseline memory shrinks
    FREE = 1
    FETCH = 2
    USE = 3
    MORE = 4  # baseline memory grows; a tensor that was just used may be part of it
    BACKWARD = 5
    UPDATE = 6
    END = 7


#: Reasons for which training waits.
_CAUSES = ("reads", "memory", "updates")


class _Where(Enum):
    MEMORY = "memory"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"


@dataclass(eq=False, slots=True)
class _Tensor:
    nbytes: int
    where: _Where = _Where.MEMORY
    job: Transfer | None = None
    move: PlannedMove | None = None
    wanted: bool = False
    #: Whether training references its memory otherwise, and whether only that keeps it.
    held: bool = False
    lingers: bool = False


@dataclass(slots=True)
class _Totals:
    """Figures of one step."""

    began: float = 0.0
    computing: float = 0.0
    stalls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CAUSES, 0.0))
    peak: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    spans: int = 0


def replay(
    profile: Profile,
    plan: LifetimePlan | None = None,
    *,
    limit: int | None = None,
    paths: Sequence[PathRates] | None = None,
    host: HostRoom | None = None,
    steps: int = 3,
) -> StepReplay:
    """Replay a step in the middle of training.

    Args:
        profile: Profile of the step.
        plan: The moves; None for nothing but the states of updates.
        limit: Bytes of memory at which training waits for writes in flight; None for the limit of
            the plan.
        paths: Paths of the plan; None for those of the profile.
        host: Host memory of the plan.
        steps: Number of simulated steps; the result is the last one, in the steady state.
    """
    if limit is None and plan is not None:
        limit = plan.limit
    rates = list(profile.paths if paths is None else paths)
    return Replay(profile, plan, limit, rates, host).run(steps)


class Replay:
    """The state of a replay; see `replay`."""

    def __init__(
        self,
        profile: Profile,
        plan: LifetimePlan | None,
        limit: int | None,
        paths: Sequence[PathRates],
        host: HostRoom | None,
    ) -> None:
        self._profile = profile
        self._limit = limit
        self._now = 0.0
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._writes: dict[str, Lane] = {}
        self._reads: dict[str, Lane] = {}
        self._spans: list[Span] = []
        places = [*paths, PathRates(HOST, host.link, host.link)] if host is not None else paths
        for path in places:
            write = Lane(f"{path.name} {'' if path.simplex else 'write'}".strip(), path)
            self._writes[path.name] = write
            self._reads[path.name] = write if path.simplex else Lane(f"{path.name} read", path)
        self._paths = [path.name for path in paths]
        self._tensors = [_Tensor(tensor.nbytes) for tensor in profile.tensors]
        self._others = profile.baseline[-1][1]
        self._memory = self._others + sum(t.nbytes for t in profile.tensors if t.cyclic)
        moves = () if plan is None else plan.moves
        self._moves = {(move.tensor, move.period): move for move in moves}
        self._step_events = sorted(self._events_of_a_step(), key=lambda event: event[:2])
        self._place = 0
        self._training = 0.0  # time of training within the step
        self._delay = 0.0  # delay of computation by transfers and updates
        self._waits: tuple[str, float] | None = None
        self._leaving = 0
        self._updates = Updates(self, profile.updates, shared_cores=profile.shared_cores)
        self._totals = _Totals()
        self._steps = 0
        self._done: StepReplay | None = None

    # -------------------------------------------------------------- interface
    def run(self, steps: int) -> StepReplay:
        """Simulate so many steps and return the last one."""
        self._steps = max(1, steps)
        self._begin_step()
        self._compute()
        while self._done is None:
            if not self._events:
                raise RuntimeError("the replay waits for an event that never happens")
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self._done

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Schedule a call."""
        heapq.heappush(self._events, (self._now + seconds, next(self._serial), happen))

    def move(self, job: Transfer, lane: Lane) -> None:
        """Queue a transfer."""
        lane.waiting.append(job)
        self._serve(lane)

    def stripe(self, what: str, nbytes: int, *, write: bool, done: Callable[[], None]) -> None:
        """Stripe bytes over all paths, in proportion to their rates."""
        lanes = [(self._writes if write else self._reads)[name] for name in self._paths]
        if not lanes or not nbytes:
            done()
            return
        rates = [lane.rates.write if write else lane.rates.read for lane in lanes]
        left = [len(lanes)]

        def part() -> None:
            left[0] -= 1
            if not left[0]:
                done()

        for lane, rate in zip(lanes, rates, strict=True):
            self.move(Transfer(what, int(nbytes * rate / sum(rates)), write, part), lane)

    def span(self, lane: str, what: str, seconds: float, nbytes: int = 0) -> None:
        """Record what a lane does from now on."""
        self._spans.append(Span(lane, what, self._now, self._now + seconds, nbytes))
        totals = self._totals
        totals.busy[lane] = totals.busy.get(lane, 0.0) + seconds
        totals.moved[lane] = totals.moved.get(lane, 0) + nbytes

    def delay(self, seconds: float) -> None:
        """Delay computation; no delay if training waits anyway."""
        if self._waits is None:
            self._delay += seconds

    def retry(self) -> None:
        """Check whether training can go on after a transfer or an update has ended."""
        self._serve_all()
        if self._waits is not None:
            self._pass_event()

    # ------------------------------------------------------------------ events
    def _events_of_a_step(self) -> list[tuple[float, int, int, int]]:
        step = self._profile.step_seconds
        events: list[tuple[float, int, int, int]] = [(step, _Kind.END, 0, 0)]
        for number, tensor in enumerate(self._profile.tensors):
            events += [(use, _Kind.USE, number, place) for place, use in enumerate(tensor.uses)]
            if tensor.held_until > tensor.uses[0]:
                events.append((min(tensor.held_until, step), _Kind.FREE, number, 0))
        for move in self._moves.values():
            at = move.fetch_at - step if move.fetch_at > step else move.fetch_at
            events.append((min(at, step), _Kind.FETCH, move.tensor, move.period))
        before = self._others
        for number, (at, nbytes) in enumerate(self._profile.baseline):
            kind = _Kind.MORE if nbytes > before else _Kind.LESS
            events.append((min(at, step), kind, number, 0))
            before = nbytes
        events.append((self._profile.forward_seconds, _Kind.BACKWARD, 0, 0))
        for number, update in enumerate(self._profile.updates):
            events.append((min(update.ready_at, step), _Kind.UPDATE, number, 0))
        return events

    def _begin_step(self) -> None:
        self._place, self._training = 0, 0.0
        self._totals = _Totals(began=self._now, peak=self._memory, spans=len(self._spans))
        self._totals.memory.append((0.0, self._memory))
        self._updates.begin_step()

    def _compute(self) -> None:
        """Compute until the next event."""
        at = self._step_events[self._place][0]
        seconds = max(0.0, at - self._training)
        lost, self._delay = self._delay, 0.0
        self._totals.computing += seconds
        self._training = max(at, self._training)
        self.at(seconds + lost, self._arrived)

    def _arrived(self) -> None:
        if self._delay > 0:  # delayed meanwhile
            lost, self._delay = self._delay, 0.0
            self.at(lost, self._arrived)
        else:
            self._pass_event()

    def _pass_event(self) -> None:
        """Pass the next event if training need not wait, and go on."""
        _, kind, number, place = self._step_events[self._place]
        missing = self._missing(_Kind(kind), number, place)
        if missing is not None:
            if self._waits is None:
                self._waits = (missing, self._now)
            return
        if self._waits is not None:
            reason, since = self._waits
            self._totals.stalls[reason] += self._now - since
            self._waits = None
        if kind == _Kind.END:
            self._end_step()
            return
        self._place += 1
        if kind in (_Kind.LESS, _Kind.MORE):
            before, self._others = self._others, self._profile.baseline[number][1]
            self._require(self._others - before)
            if self._others < before:
                self._serve_all()
        elif kind == _Kind.FREE:
            self._free(self._tensors[number])
        elif kind == _Kind.USE:
            self._use(number, place)
        elif kind == _Kind.FETCH:
            self._fetch(number)
        elif kind == _Kind.BACKWARD:
            self._updates.read_ahead()
        else:
            self._updates.ready(number)
        self._compute()

    def _missing(self, kind: _Kind, number: int, place: int) -> str | None:
        """Return what training has to wait for, or None."""
        if kind is _Kind.END:
            return None if self._updates.over else "updates"
        if kind is _Kind.MORE:
            return self._room_missing(self._profile.baseline[number][1] - self._others)
        if kind is not _Kind.USE:
            return None
        tensor, life = self._tensors[number], self._profile.tensors[number]
        if place == 0 and not life.cyclic:
            return self._room_missing(tensor.nbytes)
        if tensor.where in (_Where.MEMORY, _Where.LEAVING):
            return None
        if tensor.where is _Where.AWAY:
            self._load(tensor)
        if tensor.job is not None and not tensor.job.begun:
            assert tensor.move is not None
            lane = self._reads[tensor.move.place]
            lane.prioritize(tensor.job)
            self._serve(lane)
        return "reads"

    def _room_missing(self, nbytes: int) -> str | None:
        """Return "memory" if there is too little of it and a write in flight will free some."""
        over = self._limit is not None and self._memory + nbytes > self._limit
        return "memory" if over and self._leaving else None

    def _use(self, number: int, place: int) -> None:
        tensor, life = self._tensors[number], self._profile.tensors[number]
        if tensor.where is _Where.LEAVING:  # still in memory: cancel the offload
            assert tensor.job is not None
            if not tensor.job.begun:
                tensor.job.cancelled = True
            self._leaving -= tensor.nbytes
            tensor.where, tensor.job = _Where.MEMORY, None
        if place == 0 and not life.cyclic:
            self._require(tensor.nbytes)
        last = place == len(life.uses) - 1
        move = self._moves.get((number, place))
        if move is not None:
            self._offload(tensor, move)
        elif last and not life.cyclic:
            self._require(-tensor.nbytes)
            tensor.where = _Where.MEMORY
            self._serve_all()

    def _serve_all(self) -> None:
        """Start reads that waited for memory which may be free now."""
        for lane in (*self._reads.values(), *self._writes.values()):
            self._serve(lane)

    def _offload(self, tensor: _Tensor, move: PlannedMove) -> None:
        job: Transfer

        def gone() -> None:
            self.delay(self._profile.io_overhead * tensor.nbytes)
            if tensor.job is job:
                tensor.where, tensor.job = _Where.AWAY, None
                self._leaving -= tensor.nbytes
                if tensor.held:
                    tensor.lingers = True
                else:
                    self._require(-tensor.nbytes)
                if tensor.wanted:
                    self._load(tensor)
            self.retry()

        job = Transfer(move.name, tensor.nbytes, True, gone)
        tensor.where, tensor.job, tensor.move, tensor.wanted = _Where.LEAVING, job, move, False
        life = self._profile.tensors[move.tensor]
        tensor.held = move.period == 0 and life.held_until > life.uses[0]
        self._leaving += tensor.nbytes
        self.move(job, self._writes[move.place])

    def _free(self, tensor: _Tensor) -> None:
        """Drop training's own reference to a tensor."""
        tensor.held = False
        if tensor.lingers:
            tensor.lingers = False
            self._require(-tensor.nbytes)
            self._serve_all()

    def _fetch(self, number: int) -> None:
        tensor = self._tensors[number]
        if tensor.where is _Where.AWAY:
            self._load(tensor)
        elif tensor.where is _Where.LEAVING:
            tensor.wanted = True

    def _load(self, tensor: _Tensor) -> None:
        move = tensor.move
        assert move is not None
        tensor.where, tensor.wanted = _Where.RETURNING, False

        def room() -> bool:
            return self._limit is None or self._memory + tensor.nbytes <= self._limit

        def begins() -> None:
            self._require(tensor.nbytes)

        def back() -> None:
            self.delay(self._profile.io_overhead * tensor.nbytes)
            tensor.where, tensor.job = _Where.MEMORY, None
            self.retry()

        job = Transfer(move.name, tensor.nbytes, False, back, begins, room)
        tensor.job = job
        self.move(job, self._reads[move.place])

    # ------------------------------------------------------------------ lanes and memory
    def _serve(self, lane: Lane) -> None:
        job = lane.next()
        if job is None:
            return
        lane.busy = job.begun = True
        if job.begins is not None:
            job.begins()
        seconds = lane.seconds(job)
        self.span(lane.name, job.what, seconds, job.nbytes)

        def over() -> None:
            lane.busy = False
            job.done()
            self._serve(lane)

        self.at(seconds, over)

    def _require(self, nbytes: int) -> None:
        self._memory += nbytes
        totals = self._totals
        totals.peak = max(totals.peak, self._memory)
        totals.memory.append((self._now - totals.began, self._memory))

    # ------------------------------------------------------------------ the end
    def _end_step(self) -> None:
        self._steps -= 1
        if self._steps:
            self._begin_step()
            self._compute()
            return
        totals = self._totals
        seconds = self._now - totals.began
        shares = {
            lane: LaneUse(totals.moved[lane], busy / seconds if seconds else 0.0)
            for lane, busy in totals.busy.items()
        }
        spans = [
            Span(s.lane, s.what, s.begin - totals.began, s.end - totals.began, s.nbytes)
            for s in self._spans[totals.spans :]
        ]
        self._done = StepReplay(
            seconds, totals.computing, totals.stalls, totals.peak, shares, totals.memory, spans
        )
