"""Planning by lifetimes which tensors are offloaded, and when (Teraio, section 3.2, algorithm 1).

[Note: greedy selection]
A candidate is a tensor between its creation and its use. Its benefit is the memory above the limit
that it would relieve, times the seconds for which it does; its cost is the time of its write and
its read. The candidate with the best ratio is selected and its transfers are reserved on the path,
so that later candidates see the time that is left; their benefit is then smaller, or they leave
later. This repeats until the step fits. An old ratio is never too low (memory above the limit and
free time only decrease), so a candidate is evaluated again only when its old ratio is the best.

Candidates whose transfers cannot be hidden are selected last, by the same ratio: training will wait
for them, and a replay predicts how long.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from offload_strategy.plan_runtime.profile import (
    FORMAT,
    MemoryCurve,
    PathRates,
    Profile,
    load_json,
    write_text,
)
from offload_strategy.units import MiB, format_size, markdown_table

#: Share of a limit that is planned for, as steps differ a little; and where the C library keeps
#: freed memory: some of it, between tensors, serves none, and it is returned a little too late.
_USABLE_SHARE, _USABLE_SHARE_WITH_FREED = 0.985, 0.88
#: Tensors get so much room at least, or a share of a small limit: to let them leave takes some.
_LEAST_ROOM_BYTES, _LEAST_ROOM_SHARE = 32 * MiB, 0.125
#: What a user can do if moves are not hidden, or are not enough.
CHECKPOINT = (
    "checkpoint blocks (model.gradient_checkpointing_enable() or torch.utils.checkpoint), which "
    "then save less"
)


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """The offload of a tensor until it is used; times in seconds of the step."""

    tensor: int  # Number of the tensor in the profile
    name: str  # For people
    nbytes: int
    place: str  # Name of the path
    leaves_at: float  # From when it may be written
    gone_at: float  # When its memory is free
    fetch_at: float  # When its read starts
    needed_at: float  # When it is used
    hidden: bool = True  # Whether computation hides the transfers; otherwise training waits


@dataclass(frozen=True, slots=True)
class LifetimePlan:
    """The moves of a step, in the order in which they start; `str` gives a table in Markdown."""

    limit: int  # Bytes of memory for the step
    peak_bytes: int  # Peak memory with the moves, if all are in time
    unplanned_bytes: int  # Peak memory without any move
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
        rows = []
        for move in self.moves:
            times = (move.leaves_at, move.gone_at, move.fetch_at, move.needed_at)
            seconds = (f"{time:.3f} s" for time in times)
            remark = "" if move.hidden else "waited for"
            rows.append((move.name, format_size(move.nbytes), move.place, *seconds, remark))
        head = "tensor | size | to | leaves at | gone at | fetched at | needed at |"
        return (
            f"{format_size(self.unplanned_bytes)} without offload, {format_size(self.peak_bytes)} "
            f"with {len(self.moves)} moves of {format_size(self.moved_bytes)} in all; the limit is "
            f"{format_size(self.limit)}.\n\n{markdown_table(head, rows)}"
        )


def usable_bytes(limit: int, *, keeps_freed: bool) -> int:
    """Return the bytes to plan for if training must not exceed a limit.

    `keeps_freed` says whether the C library keeps memory of freed tensors (`Profile.keeps_freed`).
    """
    return int(limit * (_USABLE_SHARE_WITH_FREED if keeps_freed else _USABLE_SHARE))


def least_room(usable: int) -> int:
    """Return the bytes that tensors have in memory at least, even if they are beyond the limit."""
    return min(_LEAST_ROOM_BYTES, int(_LEAST_ROOM_SHARE * usable))


def plan_lifetimes(profile: Profile, limit: int) -> LifetimePlan:
    """Select what is offloaded to the path of a profile so that a step fits in a limit in bytes.

    The plan does not fit if all possible moves together are not enough.
    """
    curve = MemoryCurve(profile)
    unplanned, moves = curve.peak_bytes, []
    if profile.path is not None:
        moves = _Planner(profile, curve, profile.path, limit).select()
    return LifetimePlan(limit, curve.peak_bytes, unplanned, tuple(moves))


def plan_all(profile: Profile, leaving: Iterable[int]) -> LifetimePlan:
    """Return a plan that offloads tensors whatever room there is, and reads them just in time.

    Reads are in the order of need: a read starts earlier if the path has no time left, with
    backward at the earliest.
    """
    tensors, moves = profile.tensors, list[PlannedMove]()
    if (path := profile.path) is not None:
        reads = _Timeline(path.read)
        for number in sorted(set(leaving), key=lambda number: (-tensors[number].uses[1], -number)):
            tensor = tensors[number]
            leaves, needed = tensor.uses
            fetch = -reads.after(-needed, tensor.nbytes)
            reads.book(-needed, -fetch)
            fetch = min(needed, max(fetch, leaves, profile.forward_seconds))
            what = (number, tensor.name, tensor.nbytes, path.name)
            moves.append(PlannedMove(*what, leaves, leaves, fetch, needed))
    peak = profile.peak_bytes
    # Of reads that begin together, the one that is needed first is the first.
    most = peak + sum(tensor.nbytes for tensor in tensors)
    return LifetimePlan(most, peak, peak, tuple(reversed(moves)))


class _Timeline:
    """Reserved time of one direction of a path. Other transfers may interrupt a transfer.

    Reads are planned back from their ends, on a timeline that runs backwards: its times are
    negated. Times may lie before or after the step: such a transfer comes too late.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._begins: list[float] = []
        self._ends: list[float] = []

    def after(self, begin: float, nbytes: float) -> float:
        """Return when a tensor that may be moved from `begin` on would be there."""
        now, left = begin, nbytes / self._rate
        for place in range(bisect_right(self._ends, begin), len(self._begins)):
            if (free := self._begins[place] - now) >= left:
                break
            left -= max(0.0, free)
            now = max(now, self._ends[place])
        return now + left

    def book(self, begin: float, end: float) -> None:
        """Reserve all free seconds of a span."""
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]


#: How good a move is, the least value first, and the move with its times.
_Offer = tuple[tuple[float, float], PlannedMove]


class _Planner:
    """Selects moves; see [Note: greedy selection]."""

    def __init__(self, profile: Profile, curve: MemoryCurve, path: PathRates, limit: int) -> None:
        self._moves: list[PlannedMove] = []
        self._curve, self._path, self._limit = curve, path, limit
        self._writes, self._reads = _Timeline(path.write), _Timeline(path.read)
        # Possible moves by tensor, each with the first time at which its memory can be free.
        self._left = {
            n: PlannedMove(n, tensor.name, tensor.nbytes, path.name, begin, free, end, end)
            for n, tensor in enumerate(profile.tensors)
            for begin, end in [tensor.uses]
            if tensor.nbytes and end > (free := max(begin, tensor.held_until))
        }

    def select(self) -> list[PlannedMove]:
        """Return moves that computation hides, and others, for which training will wait."""
        for move in self._best(hidden=True):
            self._book(move)
        for move in sorted(self._best(hidden=False), key=lambda move: move.needed_at):
            # As soon as there is room: the path is the bottleneck and must not idle.
            back = self._curve.since(move.gone_at, move.needed_at, self._limit - move.nbytes)
            self._book(replace(move, fetch_at=back))
            self._curve.add(back, move.needed_at, move.nbytes)
        return sorted(self._moves, key=lambda move: (move.leaves_at, move.tensor))

    def _best(self, *, hidden: bool) -> Iterator[PlannedMove]:
        """Take moves out of the possible ones, the best offer first, until the step fits."""
        queue = [
            (*offer[0], number)
            for number, move in self._left.items()
            if (offer := self._offer(move, hidden=hidden)) is not None
        ]
        heapq.heapify(queue)
        while queue and self._curve.peak_bytes > self._limit:
            *_, number = heapq.heappop(queue)
            if (offer := self._offer(self._left[number], hidden=hidden)) is None:
                continue
            rank, move = offer
            if queue and rank > queue[0][:2]:
                heapq.heappush(queue, (*rank, number))
            else:
                del self._left[number]
                self._curve.add(move.gone_at, move.fetch_at, -move.nbytes)
                yield move

    def _offer(self, move: PlannedMove, *, hidden: bool) -> _Offer | None:
        """Return the offer of a move, whose transfers may have to be hidden; None for no relief."""
        nbytes, written, back = move.nbytes, move.leaves_at, move.needed_at
        if hidden:
            written, back = self._writes.after(written, nbytes), -self._reads.after(-back, nbytes)
        gone = max(written, move.gone_at)
        gained = self._curve.relief(gone, back, nbytes, self._limit)
        if gained <= 0:
            return None
        ratio = gained / (nbytes / self._path.write + nbytes / self._path.read)
        # The better ratio first, then the longer idle period, which leaves time to spare.
        rank = -float(f"{ratio:.9g}"), move.leaves_at - move.needed_at
        return rank, replace(move, gone_at=gone, fetch_at=back, hidden=hidden)

    def _book(self, move: PlannedMove) -> None:
        written = self._writes.after(move.leaves_at, move.nbytes)
        self._writes.book(move.leaves_at, written)
        self._reads.book(-move.needed_at, -move.fetch_at)
        self._moves.append(replace(move, gone_at=max(written, move.gone_at)))


# ---------------------------------------------------------------------- files
@dataclass(frozen=True, slots=True)
class PlannedItem:
    """What a plan file says about a saved tensor, by its number in the order of saving."""

    item: int
    bytes: Annotated[int, Field(ge=0)]
    does: Literal["leaves", "stays"]


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """The content of a plan file: all saved tensors."""

    items: Annotated[tuple[PlannedItem, ...], Field(min_length=1)]

    def __post_init__(self) -> None:
        for number, item in enumerate(self.items):
            if item.item != number:
                raise ValueError(f"item {number} is missing, or not in its place")


def save_plan(plan: LifetimePlan, profile: Profile, file: Path) -> None:
    """Write a plan as JSON, a line per tensor; ConfigError if that fails."""
    moves = {move.tensor: move for move in plan.moves}
    lines = []
    for number, tensor in enumerate(profile.tensors):
        row: dict[str, Any] = {"item": number, "name": tensor.name, "bytes": tensor.nbytes}
        move = moves.get(number)
        row |= {"does": "leaves" if move else "stays", "saved at": round(tensor.uses[0], 4)}
        if move is not None:
            row["gone at"], row["fetched at"] = round(move.gone_at, 4), round(move.fetch_at, 4)
        row["used at"] = round(tensor.uses[-1], 4)
        lines.append(json.dumps(row))
    head = f'"format": {FORMAT},\n"limit": {plan.limit},\n"peak": {plan.peak_bytes},\n'
    write_text(file, "{\n" + head + '"items": [\n' + ",\n".join(lines) + "\n]\n}\n")


def load_plan(file: Path) -> GivenPlan:
    """Read which tensors are offloaded; raise a ConfigError if the file is no plan."""
    how = "Write one with `ssd-offload plan --profile FILE --write-plan FILE`."
    return load_json(file, GivenPlan, "a plan", how)
