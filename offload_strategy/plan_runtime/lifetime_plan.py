"""Planning by lifetimes which tensors are offloaded, and when (Teraio, section 3.2, algorithm 1).

[Note: greedy selection]
A candidate is a tensor in one of its idle periods. Its benefit is the memory above the limit that
it would relieve, times the seconds for which it does; its cost is the time of its write and its
read. The candidate with the best ratio is selected and its transfers are reserved on a path, so
that later candidates see the time that is left; their benefit is then smaller, or they leave later.
This repeats until the step fits. An old ratio is never too low (memory above the limit and free
time only decrease), so a candidate is evaluated again only when its old ratio is the best.

Candidates whose transfers cannot be hidden are selected last, by the same ratio: training will wait
for them, and a replay predicts how long.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from offload_strategy.plan_runtime.booked_path import BookedPath
from offload_strategy.plan_runtime.memory_curve import MemoryCurve
from offload_strategy.plan_runtime.profile import PathRates, Profile
from offload_strategy.units import format_size

#: Name of host memory as a destination.
HOST = "host memory"
#: Share of a limit that a plan leaves free, because steps differ a little.
_MARGIN = 0.015
#: A read is urgent if it cannot start earlier than this share of its time before it must.
_SLACK = 0.5


@dataclass(frozen=True, slots=True)
class HostRoom:
    """Host memory for tensors of a device whose paths have no time left.

    Args:
        capacity: Bytes.
        link: Bytes per second between host and device, in each direction.
    """

    capacity: int
    link: float


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """The offload of a tensor during one of its idle periods; times in seconds of the step.

    Args:
        tensor: Number of the tensor in the profile.
        period: Number of the idle period.
        name: Name for people.
        nbytes: Size of the tensor.
        place: Name of the path, or `HOST`.
        leaves_at: Time from which it may be written.
        gone_at: Time at which its memory is free.
        fetch_at: Time at which its read starts.
        needed_at: Time at which it is used.
        urgent: Whether its read has no time to spare and should overtake others.
        hidden: Whether computation hides the transfers; otherwise training waits.
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
    """The moves of a step, in the order in which they start.

    Args:
        limit: Bytes of memory for the step.
        peak_bytes: Peak memory with the moves, if all are in time.
        unplanned_bytes: Peak memory without any move.
        moves: The moves.
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
        """Bytes that a step writes and reads."""
        return sum(move.nbytes for move in self.moves)

    @property
    def hidden(self) -> bool:
        """Whether training waits for no move."""
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
    #: Time from which its memory can be free.
    free_at: float


@dataclass(slots=True)
class _Offer:
    """The benefit of a candidate for its cost, and its transfers."""

    ratio: float
    place: BookedPath
    written: float
    gone: float
    back: float


def within(limit: int) -> int:
    """Return the bytes to plan for if training must stay below a limit.

    Args:
        limit: Bytes of memory that must not be exceeded.
    """
    return int(limit * (1 - _MARGIN))


def plan_lifetimes(
    profile: Profile,
    limit: int,
    *,
    paths: Sequence[PathRates] | None = None,
    host: HostRoom | None = None,
) -> LifetimePlan:
    """Select what is offloaded so that a step fits in a limit.

    Args:
        profile: Profile of the step.
        limit: Bytes of memory that the step may require.
        paths: Paths for tensors; None for those of the profile.
        host: Host memory in addition to the paths, for tensors of a device.

    Returns:
        The plan; it does not fit if all possible moves together are not enough.
    """
    booked = [BookedPath(rates) for rates in (profile.paths if paths is None else paths)]
    planner = _Planner(profile, limit, booked, host)
    unplanned = planner.curve.peak_bytes
    planner.choose()
    if planner.curve.peak_bytes > limit:
        planner.force()
    moves = sorted(planner.moves, key=lambda move: (move.leaves_at, move.tensor))
    return LifetimePlan(limit, planner.curve.peak_bytes, unplanned, tuple(moves))


class _Planner:
    def __init__(
        self, profile: Profile, limit: int, paths: list[BookedPath], host: HostRoom | None
    ) -> None:
        self.curve = MemoryCurve(profile.tensors, profile.step_seconds, profile.baseline)
        self.moves: list[PlannedMove] = []
        self._limit = limit
        self._paths = paths
        self._host_capacity = 0 if host is None else host.capacity
        self._host = None
        if host is not None:
            self._host = BookedPath(PathRates(HOST, host.link, host.link))
        self._host_used = MemoryCurve((), profile.step_seconds)
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
        """Select moves that computation hides; see [Note: greedy selection]."""
        taken = set()
        for number, offer in self._best_first(self._offer):
            self._take(self._left[number], offer)
            taken.add(number)
        self._left = [one for number, one in enumerate(self._left) if number not in taken]

    def force(self) -> None:
        """Select further moves, for which training will wait."""
        if not self._paths:
            return
        fastest = max(self._paths, key=lambda path: min(path.rates.read, path.rates.write))
        forced = []
        for number, _ in self._best_first(lambda one: self._forced_offer(one, fastest)):
            one = self._left[number]
            self.curve.add(one.free_at, one.end, -one.nbytes)
            forced.append(one)
        for one in sorted(forced, key=lambda one: one.end):
            # As soon as there is room: the path is the bottleneck and must not idle.
            back = self.curve.since(one.free_at, one.end, self._limit - one.nbytes)
            path = min(self._paths, key=lambda path: path.reads.busy_seconds)
            written = path.writes.after(one.begin, path.write_seconds(one.nbytes))
            gone = max(written, one.free_at)
            path.book(one.begin, written, back, one.end)
            self.curve.add(back, one.end, one.nbytes)
            self._note(one, path, gone, back, hidden=False)

    def _best_first(
        self, look: Callable[[_Candidate], _Offer | None]
    ) -> Iterator[tuple[int, _Offer]]:
        """Yield candidates, the best one that is left first, until the step fits.

        Args:
            look: Evaluates a candidate now. The caller selects a candidate before the next one.
        """
        queue = [
            (*_rank(offer.ratio, candidate), number)
            for number, candidate in enumerate(self._left)
            if (offer := look(candidate)) is not None
        ]
        heapq.heapify(queue)
        while queue and self.curve.peak_bytes > self._limit:
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
            # SSDs first: host memory is scarce. See section 3.2.
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
        """Return the offer for being away in a span; None if that relieves nothing."""
        gained = self.curve.relief(gone, back, one.nbytes, self._limit)
        if gained <= 0:
            return None
        cost = path.write_seconds(one.nbytes) + path.read_seconds(one.nbytes)
        return _Offer(gained / cost, path, written, gone, back)

    def _take(self, one: _Candidate, offer: _Offer) -> None:
        offer.place.book(one.begin, offer.written, offer.back, one.end)
        self.curve.add(offer.gone, offer.back, -one.nbytes)
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
    """Sort by the better ratio, then by the longer idle period, which leaves time to spare."""
    return -float(f"{ratio:.9g}"), one.begin - one.end
