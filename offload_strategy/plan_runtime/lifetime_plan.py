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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.step_usage import BookedPath, MemoryCurve
from offload_strategy.units import format_size

#: Share of a limit that a plan leaves free, because steps differ a little.
_MARGIN = 0.015
#: A read is urgent if it cannot start earlier than this share of its time before it must.
_SLACK = 0.5
#: What a user can do if moves are not hidden, or are not enough.
CHECKPOINT = (
    "checkpoint blocks (model.gradient_checkpointing_enable() or torch.utils.checkpoint), which "
    "then save less"
)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """The offload of a tensor during one of its idle periods; times in seconds of the step.

    Args:
        tensor: Number of the tensor in the profile.
        period: Number of the idle period.
        name: Name for people.
        nbytes: Size of the tensor.
        place: Name of the path.
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


def within(limit: int) -> int:
    """Return the bytes to plan for if training must not exceed a limit."""
    return int(limit * (1 - _MARGIN))


def plan_lifetimes(profile: Profile, limit: int) -> LifetimePlan:
    """Select what is offloaded to the paths of a profile so that a step fits in a limit in bytes.

    The plan does not fit if all possible moves together are not enough.
    """
    planner = _Planner(profile, limit)
    unplanned = planner.curve.peak_bytes
    planner.choose()
    planner.force()
    moves = sorted(planner.moves, key=lambda move: (move.leaves_at, move.tensor))
    return LifetimePlan(limit, planner.curve.peak_bytes, unplanned, tuple(moves))


@dataclass(slots=True)
class _Offer:
    """The benefit of a move for its cost, and its transfers."""

    ratio: float
    path: BookedPath
    written: float
    gone: float
    back: float


class _Planner:
    def __init__(self, profile: Profile, limit: int) -> None:
        self.curve = MemoryCurve(profile.tensors, profile.step_seconds, profile.baseline)
        self.moves: list[PlannedMove] = []
        self._limit = limit
        self._paths = [BookedPath(rates) for rates in profile.paths]
        # Possible moves by number, each with the first time at which its memory can be free.
        self._left = dict(
            enumerate(
                PlannedMove(number, period, tensor.name, tensor.nbytes, "", begin, free, end, end)
                for number, tensor in enumerate(profile.tensors)
                for period, (begin, end) in enumerate(tensor.idle_periods(profile.step_seconds))
                if tensor.nbytes and end > (free := max(begin, tensor.held_until))
            )
        )

    def choose(self) -> None:
        """Select moves that computation hides; see [Note: greedy selection]."""
        for number, offer in self._best_first(self._hidden_offer):
            move = self._left.pop(number)
            self.curve.add(offer.gone, offer.back, -move.nbytes)
            self._book(move, offer.path, offer.written, offer.back, hidden=True)

    def force(self) -> None:
        """Select further moves, for which training will wait."""
        if not self._paths or self.curve.peak_bytes <= self._limit:
            return
        fastest = max(self._paths, key=lambda path: min(path.rates.read, path.rates.write))
        forced = []
        for number, _ in self._best_first(
            lambda move: self._offer(move, fastest, move.leaves_at, move.needed_at)
        ):
            move = self._left[number]
            self.curve.add(move.gone_at, move.needed_at, -move.nbytes)
            forced.append(move)
        for move in sorted(forced, key=lambda move: move.needed_at):
            # As soon as there is room: the path is the bottleneck and must not idle.
            back = self.curve.since(move.gone_at, move.needed_at, self._limit - move.nbytes)
            path = min(self._paths, key=lambda path: path.reads.busy_seconds)
            self._book(move, path, path.written(move.nbytes, move.leaves_at), back, hidden=False)
            self.curve.add(back, move.needed_at, move.nbytes)

    def _best_first(
        self, look: Callable[[PlannedMove], _Offer | None]
    ) -> Iterator[tuple[int, _Offer]]:
        """Yield the numbers of moves and what `look` offers for them, until the step fits.

        The best offer comes first. The caller selects a move before it asks for the next one.
        """
        queue = [
            (*_rank(offer, move), number)
            for number, move in self._left.items()
            if (offer := look(move)) is not None
        ]
        heapq.heapify(queue)
        while queue and self.curve.peak_bytes > self._limit:
            *_, number = heapq.heappop(queue)
            offer = look(self._left[number])
            if offer is None:
                continue
            rank = _rank(offer, self._left[number])
            if queue and rank > queue[0][:2]:
                heapq.heappush(queue, (*rank, number))
            else:
                yield number, offer

    def _hidden_offer(self, move: PlannedMove) -> _Offer | None:
        """Return the best offer of a path that has time for the transfers."""
        best = None
        for path in self._paths:
            written = path.written(move.nbytes, move.leaves_at)
            back = path.read_from(move.nbytes, move.needed_at)
            offer = self._offer(move, path, written, back)
            if offer is not None and (best is None or offer.ratio > best.ratio):
                best = offer
        return best

    def _offer(
        self, move: PlannedMove, path: BookedPath, written: float, back: float
    ) -> _Offer | None:
        """Return the offer for being away in a span; None if that relieves nothing."""
        gone = max(written, move.gone_at)
        gained = self.curve.relief(gone, back, move.nbytes, self._limit) if gone < back else 0.0
        if gained <= 0:
            return None
        cost = sum(path.rates.seconds(move.nbytes, write=write) for write in (True, False))
        return _Offer(gained / cost, path, written, gone, back)

    def _book(
        self, move: PlannedMove, path: BookedPath, written: float, back: float, *, hidden: bool
    ) -> None:
        path.writes.book(move.leaves_at, written)
        path.reads.book(back, move.needed_at)
        gone = max(written, move.gone_at)
        urgent = back - gone < _SLACK * path.rates.seconds(move.nbytes, write=False)
        place = path.rates.name
        self.moves.append(
            replace(move, place=place, gone_at=gone, fetch_at=back, urgent=urgent, hidden=hidden)
        )


def _rank(offer: _Offer, move: PlannedMove) -> tuple[float, float]:
    """Sort by the better ratio, then by the longer idle period, which leaves time to spare."""
    return -float(f"{offer.ratio:.9g}"), move.leaves_at - move.needed_at
