"""What leaves memory, and when it is back: chosen by lifetimes (Teraio, section 3.2, algorithm 1).

[Note: the choice]
A candidate is a tensor in one of its idle periods. Its benefit is the memory above the limit that
it would relieve, times the seconds for which it does; its cost is the time of its write and its
read. The one with the best ratio is taken and its moves are booked, so that those that come after
it see what the paths have left; what it gains is then less, or it is gone later. So it goes on
until the step fits. An old ratio is never too low (memory above the limit and free time only become
less), so a candidate is looked at again only when its old one is the best.

What cannot be hidden at all is taken last, by the same ratio: training will wait for it, and a
replay tells how long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offload_strategy.plan_runtime.booked_path import BookedPath
from offload_strategy.plan_runtime.memory_curve import Pressure
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.units import format_size

#: Name of the place that is host memory.
HOST = "host memory"
#: Share of a limit that a plan leaves free while training runs: steps differ a little.
_MARGIN = 0.015
#: A read that could begin no earlier than by this share of its time before it must is urgent.
_SLACK = 0.5


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory that tensors of a device may be in when the paths are booked out.

    Args:
        capacity: bytes.
        link: bytes per second between host and device, in each direction.
    """

    capacity: int
    link: float


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A tensor that is elsewhere during one of its idle periods.

    Args:
        tensor: its number in the profile.
        period: number of its idle period.
        name: for people.
        nbytes: of it.
        place: name of the path, or `HOST`.
        leaves_at: seconds from the begin of the step: its write may begin.
        gone_at: its memory is free.
        fetch_at: its read begins.
        needed_at: it is used.
        urgent: whether its read has no time to spare, and should overtake others.
        hidden: whether the moves fit into the time in which training computes; else it waits.
    """

    tensor: int
    period: int
    name: str
    nbytes: int
    place: str
    leaves_at: float
    gone_at: float
    fetch_at: float
    needed_at: float
    urgent: bool = False
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class LifetimePlan:
    """The moves of a step, in the order in which they begin.

    Args:
        limit: bytes that the step was to fit in.
        peak_bytes: required with the moves, if all happens in time.
        unplanned_bytes: required without any move.
        moves: all of them.
    """

    limit: int
    peak_bytes: int
    unplanned_bytes: int
    moves: tuple[PlannedMove, ...]

    @property
    def fits(self) -> bool:
        """Whether the step stays within its limit."""
        return self.peak_bytes <= self.limit

    @property
    def moved_bytes(self) -> int:
        """Written in a step, and read again."""
        return sum(move.nbytes for move in self.moves)

    @property
    def hidden(self) -> bool:
        """Whether training waits for none of them."""
        return all(move.hidden for move in self.moves)

    def __str__(self) -> str:
        """A table in Markdown."""
        rows = [
            f"{format_size(self.unplanned_bytes)} without offload, {format_size(self.peak_bytes)} "
            f"with {len(self.moves)} moves of {format_size(self.moved_bytes)} in all; the limit is "
            f"{format_size(self.limit)}.",
            "",
            "| tensor | size | to | leaves at | gone at | fetched at | needed at | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for move in self.moves:
            remark = "urgent" if move.urgent else ""
            remark = remark if move.hidden else "waited for"
            rows.append(
                f"| {move.name} | {format_size(move.nbytes)} | {move.place} "
                f"| {move.leaves_at:.3f} s | {move.gone_at:.3f} s | {move.fetch_at:.3f} s "
                f"| {move.needed_at:.3f} s | {remark} |"
            )
        return "\n".join(rows)


@dataclass(slots=True)
class _Candidate:
    tensor: int
    period: int
    name: str
    nbytes: int
    begin: float
    end: float
    #: From then on its memory can be free.
    free_at: float


@dataclass(slots=True)
class _Offer:
    """What a candidate would gain, and where."""

    ratio: float
    place: BookedPath
    written: float
    gone: float
    back: float


def within(limit: int) -> int:
    """The bytes that training plans for where it must stay below a limit.

    Args:
        limit: bytes of memory that must not be exceeded.
    """
    return int(limit * (1 - _MARGIN))


def plan_lifetimes(
    profile: Profile,
    limit: int,
    *,
    paths: Sequence[PathRates] | None = None,
    host: HostRoom | None = None,
) -> LifetimePlan:
    """Choose what leaves, so that a step fits in a limit.

    Args:
        profile: of the step.
        limit: bytes of memory that it may require.
        paths: where tensors may go; None for those of the profile.
        host: host memory beside them, for tensors of a device.

    Returns:
        The plan; where even all moves together are not enough, it does not fit.
    """
    booked = [BookedPath(rates) for rates in (profile.paths if paths is None else paths)]
    planner = _Planner(profile, limit, booked, host)
    unplanned = planner.pressure.peak_bytes
    planner.choose()
    if planner.pressure.peak_bytes > limit:
        planner.force()
    moves = sorted(planner.moves, key=lambda move: (move.leaves_at, move.tensor))
    return LifetimePlan(limit, planner.pressure.peak_bytes, unplanned, tuple(moves))


class _Planner:
    def __init__(
        self, profile: Profile, limit: int, paths: list[BookedPath], host: HostRoom | None
    ) -> None:
        self.pressure = Pressure(profile.tensors, profile.step_seconds, profile.beside)
        self.moves: list[PlannedMove] = []
        self._limit = limit
        self._paths = paths
        self._host_capacity = 0 if host is None else host.capacity
        self._host = None
        if host is not None:
            self._host = BookedPath(PathRates(HOST, host.link, host.link))
        self._host_used = Pressure((), profile.step_seconds)
        self._left = [
            _Candidate(
                number,
                period,
                tensor.name,
                tensor.nbytes,
                begin,
                end,
                max(begin, tensor.held_until),
            )
            for number, tensor in enumerate(profile.tensors)
            if tensor.nbytes
            for period, (begin, end) in enumerate(tensor.idle_periods(profile.step_seconds))
            if end > max(begin, tensor.held_until)
        ]

    def choose(self) -> None:
        """Take what can be hidden; see [Note: the choice]."""
        taken = set()
        for number, offer in self._best_first(self._offer):
            self._take(self._left[number], offer)
            taken.add(number)
        self._left = [one for number, one in enumerate(self._left) if number not in taken]

    def force(self) -> None:
        """Take more, for which training will wait."""
        if not self._paths:
            return
        fastest = max(self._paths, key=lambda path: min(path.rates.read, path.rates.write))
        forced = []
        for number, _ in self._best_first(lambda one: self._forced_offer(one, fastest)):
            one = self._left[number]
            self.pressure.add(one.free_at, one.end, -one.nbytes)
            forced.append(one)
        for one in sorted(forced, key=lambda one: one.end):
            # As soon as there is room for it: the path is what limits, and must not idle.
            back = self.pressure.since(one.free_at, one.end, self._limit - one.nbytes)
            path = min(self._paths, key=lambda path: path.reads.busy_seconds)
            written = path.writes.after(one.begin, path.write_seconds(one.nbytes))
            gone = max(written, one.free_at)
            path.book(one.begin, written, back, one.end)
            self.pressure.add(back, one.end, one.nbytes)
            self._note(one, path, gone, back, hidden=False)

    def _best_first(
        self, look: Callable[[_Candidate], _Offer | None]
    ) -> Iterator[tuple[int, _Offer]]:
        """Numbers of candidates, the best of what is left first, until the step fits.

        Args:
            look: what a candidate offers now. What is given must be taken before the next.
        """
        queue = [
            (*_rank(offer.ratio, candidate), number)
            for number, candidate in enumerate(self._left)
            if (offer := look(candidate)) is not None
        ]
        heapq.heapify(queue)
        while queue and self.pressure.peak_bytes > self._limit:
            *_, number = heapq.heappop(queue)
            offer = look(self._left[number])
            if offer is None:
                continue
            rank = _rank(offer.ratio, self._left[number])
            if queue and rank > queue[0][:2]:
                heapq.heappush(queue, (*rank, number))
            else:
                yield number, offer

    def _forced_offer(self, one: _Candidate, path: BookedPath) -> _Offer | None:
        return self._offer_for(one, path, one.begin, one.free_at, one.end)

    def _offer(self, one: _Candidate) -> _Offer | None:
        best = None
        for path in self._paths:
            offer = self._offer_of(one, path)
            if offer is not None and (best is None or offer.ratio > best.ratio):
                best = offer
        if best is None and self._host is not None:
            # SSDs first: host memory is dear. See section 3.2.
            best = self._offer_of(one, self._host)
            if best is not None:
                used = self._host_used.most(one.begin, one.end)
                if used + one.nbytes > self._host_capacity:
                    return None
        return best

    def _offer_of(self, one: _Candidate, path: BookedPath) -> _Offer | None:
        span = path.away(one.nbytes, one.begin, one.end)
        if span is None:
            return None
        written, back = span
        gone = max(written, one.free_at)
        return self._offer_for(one, path, written, gone, back) if gone < back else None

    def _offer_for(
        self, one: _Candidate, path: BookedPath, written: float, gone: float, back: float
    ) -> _Offer | None:
        """What it gains to be gone meanwhile; None for nothing."""
        gained = self.pressure.relief(gone, back, one.nbytes, self._limit)
        if gained <= 0:
            return None
        cost = path.write_seconds(one.nbytes) + path.read_seconds(one.nbytes)
        return _Offer(gained / cost, path, written, gone, back)

    def _take(self, one: _Candidate, offer: _Offer) -> None:
        offer.place.book(one.begin, offer.written, offer.back, one.end)
        self.pressure.add(offer.gone, offer.back, -one.nbytes)
        if offer.place is self._host:
            self._host_used.add(one.begin, one.end, one.nbytes)
        self._note(one, offer.place, offer.gone, offer.back, hidden=True)

    def _note(
        self, one: _Candidate, path: BookedPath, gone: float, back: float, *, hidden: bool
    ) -> None:
        self.moves.append(
            PlannedMove(
                one.tensor,
                one.period,
                one.name,
                one.nbytes,
                path.rates.name,
                leaves_at=one.begin,
                gone_at=gone,
                fetch_at=back,
                needed_at=one.end,
                urgent=back - gone < _SLACK * path.read_seconds(one.nbytes),
                hidden=hidden,
            )
        )


def _rank(ratio: float, one: _Candidate) -> tuple[float, float]:
    """What comes first: the better ratio; of equal ones what lies longest, with time to spare."""
    return -float(f"{ratio:.9g}"), one.begin - one.end
