"""A step, event by event: training computes, paths move, and each waits for the other.

[Note: what is replayed]
Training passes the marks of a profile in order: a tensor is made, used, may leave, should be
fetched; other things need more memory, or less; gradients of an update are final. Between two
marks it computes. It waits for a tensor that is not back, for memory where the limit is reached and
something is on its way out, and at the end of the step for updates. Each direction of a path moves
one thing at a time, first in, first out; what training waits for overtakes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from offload_strategy.plan_runtime.lifetime_plan import HOST, HostRoom, LifetimePlan, PlannedMove
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.plan_runtime.replay_lanes import Job, Lane, LaneUse, Span, StepReplay
from offload_strategy.plan_runtime.replay_optimizer import Updates


class _Kind(IntEnum):
    """In which order marks of the same moment are passed."""

    LESS = 0  # other things need less memory
    FREE = 1
    FETCH = 2
    USE = 3
    MORE = 4  # other things need more: what was used just now may be among them
    BACKWARD = 5
    UPDATE = 6
    END = 7


#: What training can wait for.
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
    job: Job | None = None
    move: PlannedMove | None = None
    wanted: bool = False
    #: Whether training holds on to its memory otherwise, and whether that alone keeps it.
    held: bool = False
    lingers: bool = False


@dataclass(slots=True)
class _Totals:
    """Of one step."""

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
        profile: of the step.
        plan: what moves; None for nothing but the states of updates.
        limit: bytes of memory at which training waits for what is on its way out; None for that
            of the plan.
        paths: of the plan; None for those of the profile.
        host: of the plan.
        steps: how many to go through; the last is told about, when all is in full swing.
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
        self._others = profile.beside[-1][1]
        self._memory = self._others + sum(t.nbytes for t in profile.tensors if t.cyclic)
        moves = () if plan is None else plan.moves
        self._moves = {(move.tensor, move.period): move for move in moves}
        self._marks = sorted(self._marks_of_a_step(), key=lambda mark: mark[:2])
        self._place = 0
        self._training = 0.0  # training's own time within the step
        self._debt = 0.0  # what computing has lost to moves and updates
        self._waits: tuple[str, float] | None = None
        self._leaving = 0
        self._updates = Updates(self, profile.updates, shared_cores=profile.shared_cores)
        self._totals = _Totals()
        self._steps = 0
        self._done: StepReplay | None = None

    # ------------------------------------------------------------------ the outside
    def run(self, steps: int) -> StepReplay:
        """Go through so many steps; what the last one was like."""
        self._steps = max(1, steps)
        self._begin_step()
        self._compute()
        while self._done is None:
            if not self._events:
                raise RuntimeError("the replay waits for something that never comes")
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self._done

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (self._now + seconds, next(self._serial), happen))

    def move(self, job: Job, lane: Lane) -> None:
        """Queue a job."""
        lane.waiting.append(job)
        self._serve(lane)

    def spread(self, what: str, nbytes: int, *, write: bool, done: Callable[[], None]) -> None:
        """Move bytes over all paths at once, in proportion to what they take."""
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
            self.move(Job(what, int(nbytes * rate / sum(rates)), write, part), lane)

    def span(self, lane: str, what: str, seconds: float, nbytes: int = 0) -> None:
        """Note what a lane does from now on."""
        self._spans.append(Span(lane, what, self._now, self._now + seconds, nbytes))
        totals = self._totals
        totals.busy[lane] = totals.busy.get(lane, 0.0) + seconds
        totals.moved[lane] = totals.moved.get(lane, 0) + nbytes

    def owe(self, seconds: float) -> None:
        """Computing loses time; nothing if it waits anyway."""
        if self._waits is None:
            self._debt += seconds

    def retry(self) -> None:
        """Something has ended: perhaps what training waits for."""
        self._serve_all()
        if self._waits is not None:
            self._pass_mark()

    # ------------------------------------------------------------------ marks
    def _marks_of_a_step(self) -> list[tuple[float, int, int, int]]:
        step = self._profile.step_seconds
        marks: list[tuple[float, int, int, int]] = [(step, _Kind.END, 0, 0)]
        for number, tensor in enumerate(self._profile.tensors):
            marks += [(use, _Kind.USE, number, place) for place, use in enumerate(tensor.uses)]
            if tensor.held_until > tensor.uses[0]:
                marks.append((min(tensor.held_until, step), _Kind.FREE, number, 0))
        for move in self._moves.values():
            at = move.fetch_at - step if move.fetch_at > step else move.fetch_at
            marks.append((min(at, step), _Kind.FETCH, move.tensor, move.period))
        before = self._others
        for number, (at, nbytes) in enumerate(self._profile.beside):
            kind = _Kind.MORE if nbytes > before else _Kind.LESS
            marks.append((min(at, step), kind, number, 0))
            before = nbytes
        marks.append((self._profile.forward_seconds, _Kind.BACKWARD, 0, 0))
        for number, update in enumerate(self._profile.updates):
            marks.append((min(update.ready_at, step), _Kind.UPDATE, number, 0))
        return marks

    def _begin_step(self) -> None:
        self._place, self._training = 0, 0.0
        self._totals = _Totals(began=self._now, peak=self._memory, spans=len(self._spans))
        self._totals.memory.append((0.0, self._memory))
        self._updates.begin_step()

    def _compute(self) -> None:
        """Compute until the next mark."""
        at = self._marks[self._place][0]
        seconds = max(0.0, at - self._training)
        lost, self._debt = self._debt, 0.0
        self._totals.computing += seconds
        self._training = max(at, self._training)
        self.at(seconds + lost, self._arrived)

    def _arrived(self) -> None:
        if self._debt > 0:  # lost meanwhile
            lost, self._debt = self._debt, 0.0
            self.at(lost, self._arrived)
        else:
            self._pass_mark()

    def _pass_mark(self) -> None:
        """Pass the next mark if nothing is missing, and go on."""
        _, kind, number, place = self._marks[self._place]
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
            before, self._others = self._others, self._profile.beside[number][1]
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
        """What training has to wait for, or None."""
        if kind is _Kind.END:
            return None if self._updates.over else "updates"
        if kind is _Kind.MORE:
            return self._room_missing(self._profile.beside[number][1] - self._others)
        if kind is not _Kind.USE:
            return None
        tensor, life = self._tensors[number], self._profile.tensors[number]
        if place == 0 and not life.cyclic:
            return self._room_missing(tensor.nbytes)
        if tensor.where in (_Where.MEMORY, _Where.LEAVING):
            return None
        if tensor.where is _Where.AWAY:
            self._bring_back(tensor)
        if tensor.job is not None and not tensor.job.begun:
            assert tensor.move is not None
            lane = self._reads[tensor.move.place]
            lane.hurry(tensor.job)
            self._serve(lane)
        return "reads"

    def _room_missing(self, nbytes: int) -> str | None:
        """Whether to wait for memory, as something is on its way out that will make room."""
        over = self._limit is not None and self._memory + nbytes > self._limit
        return "memory" if over and self._leaving else None

    def _use(self, number: int, place: int) -> None:
        tensor, life = self._tensors[number], self._profile.tensors[number]
        if tensor.where is _Where.LEAVING:  # handed back from memory
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
            self._give_away(tensor, move)
        elif last and not life.cyclic:
            self._require(-tensor.nbytes)
            tensor.where = _Where.MEMORY
            self._serve_all()

    def _serve_all(self) -> None:
        """Memory may have become free: reads that waited for room may begin."""
        for lane in (*self._reads.values(), *self._writes.values()):
            self._serve(lane)

    def _give_away(self, tensor: _Tensor, move: PlannedMove) -> None:
        job: Job

        def gone() -> None:
            self.owe(self._profile.toll * tensor.nbytes)
            if tensor.job is job:
                tensor.where, tensor.job = _Where.AWAY, None
                self._leaving -= tensor.nbytes
                if tensor.held:
                    tensor.lingers = True
                else:
                    self._require(-tensor.nbytes)
                if tensor.wanted:
                    self._bring_back(tensor)
            self.retry()

        job = Job(move.name, tensor.nbytes, True, gone)
        tensor.where, tensor.job, tensor.move, tensor.wanted = _Where.LEAVING, job, move, False
        life = self._profile.tensors[move.tensor]
        tensor.held = move.period == 0 and life.held_until > life.uses[0]
        self._leaving += tensor.nbytes
        self.move(job, self._writes[move.place])

    def _free(self, tensor: _Tensor) -> None:
        """Training does not hold on to it any more."""
        tensor.held = False
        if tensor.lingers:
            tensor.lingers = False
            self._require(-tensor.nbytes)
            self._serve_all()

    def _fetch(self, number: int) -> None:
        tensor = self._tensors[number]
        if tensor.where is _Where.AWAY:
            self._bring_back(tensor)
        elif tensor.where is _Where.LEAVING:
            tensor.wanted = True

    def _bring_back(self, tensor: _Tensor) -> None:
        move = tensor.move
        assert move is not None
        tensor.where, tensor.wanted = _Where.RETURNING, False

        def room() -> bool:
            return self._limit is None or self._memory + tensor.nbytes <= self._limit

        def begins() -> None:
            self._require(tensor.nbytes)

        def back() -> None:
            self.owe(self._profile.toll * tensor.nbytes)
            tensor.where, tensor.job = _Where.MEMORY, None
            self.retry()

        job = Job(move.name, tensor.nbytes, False, back, begins, room)
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
