"""The order and the times in which backward uses saved tensors, learned from earlier passes.

[Note: which pass is next]
Several passes may be in flight, and their backwards may run in any order: an interleaved pipeline
alternates between its stages, whose passes are of one kind. The number of passes between one
backward and the next repeats from step to step, so the next pass is looked up by the last few of
these distances; if these are new, by the pass that followed one of this kind the last time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeVar

from offload_strategy.activations.forward_records import Trace, UseOrder

_K = TypeVar("_K")
_T = TypeVar("_T")

#: Largest number of kinds of forward passes, and of their prefixes, that are remembered.
_MOST_PLANS = 64
_MOST_IDLE_TIMES = 65536
#: Number of distances by which the next pass is looked up, and of such rows.
_DISTANCES = 8
_MOST_FOLLOWING = 4096


class UseOrderHistory:
    """Use orders by kind of forward pass; the oldest are dropped."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, UseOrder] = OrderedDict()
        # By prefix of an item: for how long it is unused, and how long after the first it is saved.
        self._idle: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._following: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._distances: deque[int] = deque(maxlen=_DISTANCES)

    def learn(self, trace: Trace) -> bool:
        """Learn from a trace; return False if it has nothing new."""
        if len(trace.uses) == trace.learned:
            return False
        trace.learned = len(trace.uses)
        first = trace.uses[0][1]
        sequence = [number for number, _, _ in trace.uses]
        due = [at - first - waited for _, at, waited in trace.uses]
        known = self._plans.get(trace.signature)
        if known is not None and known.due is not None and known.sequence == sequence:
            # One slow step must not determine the loads of the next.
            due = [(old + new) / 2 for old, new in zip(known.due, due, strict=True)]
        _remember(self._plans, trace.signature, UseOrder(sequence, due), _MOST_PLANS)
        for number, at, waited in trace.uses:
            saved = trace.saved_at[number]
            times = (at - waited - saved, saved - trace.saved_at[0])
            _remember(self._idle, trace.prefixes[number], times, _MOST_IDLE_TIMES)
        return True

    def plan(self, trace: Trace) -> UseOrder:
        """Return the learned use order for a pass, or the reverse order of saving."""
        known = self._plans.get(trace.signature)
        if known is None:
            return UseOrder(list(range(len(trace.saved_at) - 1, -1, -1)))
        self._plans.move_to_end(trace.signature)
        return known

    def times(self, prefix: int) -> tuple[float | None, float | None]:
        """Return for how many seconds the last item of such a prefix is unused, if known.

        And how many seconds after the first save of its pass it is saved.
        """
        return self._idle.get(prefix, (None, None))

    def follows(self, trace: Trace, distance: int) -> None:
        """Learn by how many passes the next backward was later (or earlier)."""
        for row in ((), self._distances):  # see [Note: which pass is next]
            _remember(self._following, (trace.signature, *row), distance, _MOST_FOLLOWING)
        self._distances.append(distance)

    def following(self, trace: Trace) -> int | None:
        """Return by how many passes the pass of the next backward is later, or None."""
        known = self._following.get((trace.signature, *self._distances))
        return self._following.get((trace.signature,)) if known is None else known


def _remember(book: OrderedDict[_K, _T], key: _K, value: _T, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)
