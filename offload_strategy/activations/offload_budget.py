"""How much of what is saved may leave: an amount from the config, or what the path can hide.

[Note: the automatic budget]
Three rules, of which each sees what the others cannot:

- *What is used soon stays.* An item that lies unused for less time than the way out and back takes
  (as learned) is kept: what backward needs first, above all.
- *A path that is behind gets no more.* While more than a share of a step's bytes waits to be
  written, items are kept; so the forward pass produces what it likes, and what leaves is what the
  path takes in meanwhile. Waiting a little buys a lot of memory where the path keeps pace on
  average: forward may wait for `ALLOWANCE` of a step's time.
- *What backward had to wait for was too much.* Of a pass whose loads came late, less may leave the
  next time, by what the path reads in the time that was lost: all of that if the pass before it
  waited too, for the first time it may be chance (another process, a disk that paused), so that
  most stays allowed. More again when it has time to spare, and sooner and sooner.
"""

from __future__ import annotations

from typing import Protocol

from offload_strategy.activations.use_order import Trace
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Share of a step's time that training may wait for activations.
ALLOWANCE = 0.01
#: Share of a step's bytes that may wait to be written, and the least that may. A small pass gives
#: away a larger share at once (see outbox.py), and what is behind such a batch must not be held up,
#: if the path takes it in within so many seconds.
_BACKLOG_SHARE = 0.06
_SMALL_PASS_SHARE, _SMALL_PASS_BYTES = 0.15, 96 * MiB
_SMALL_PASS_SECONDS = 0.06
_LEAST_BACKLOG_BYTES = 32 * MiB
#: Until a step was seen whole.
_FIRST_BACKLOG_BYTES = 64 * MiB
#: Share of a step's time within which an item may be used so soon that it had better stay. Without
#: a bound, a path that was slow once would never be tried again.
_SOON = 0.1
#: Share of what left by which one late pass lowers the limit at most.
_CHANCE = 0.2
#: By how much an automatic limit grows in a step that had no need to wait, at first; twice as much
#: after each further one.
_GROWTH = 0.02
#: Steps after which the amount is told.
_SETTLED = 5


class Traffic(Protocol):
    """What the automatic budget must know of the tiers."""

    def writing_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""

    def rate(self, *, write: bool) -> float | None:
        """Bytes per second of a direction, or None while that is not known."""

    def has_room_in_memory(self, nbytes: int) -> bool:
        """Whether a tier in host memory takes so much without writing anything."""

    def await_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """Wait until no more than that is to be written, or so long; the seconds it took."""

    def own_writing_bytes(self) -> int:
        """Bytes of activations that wait to be written, or are being written."""

    def await_own_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """As `await_writing_at_most`, of activations."""

    def let_go(self) -> None:
        """Give up the memory of what was written."""

    def keep_idle(self, nbytes: int) -> None:
        """Give idle buffers back beyond so many bytes, from now on."""


class FixedBudget:
    """An amount per forward pass.

    Args:
        budget: bytes (int), share of what is saved (float, 0 to 1), or None for no limit.
    """

    def __init__(self, budget: int | float | None) -> None:
        self._budget = budget

    def admits(self, nbytes: int, trace: Trace, idle: float | None) -> bool:
        """Whether an item may leave.

        Args:
            nbytes: its size.
            trace: of the forward pass so far, this item included in what was saved.
            idle: seconds for which it will lie unused, or None if that is not known.
        """
        if self._budget is None:
            return True
        share = isinstance(self._budget, float)
        limit = self._budget * trace.saved_bytes if share else self._budget
        return trace.left_bytes + nbytes <= limit

    def must_leave(self, trace: Trace) -> int | None:
        """Backward begins: bytes of what is still to be written that must go on leaving.

        Returns:
            None for all of it. The rest had better stay: it was on its way for nothing.
        """
        return None

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """Backward uses an item for the first time.

        Args:
            trace: of its pass, this use included.
            loaded_bytes: of items of the pass that left and are in memory again, but for this one.
            nbytes: of this one.
        """

    def observe(self, trace: Trace) -> None:
        """A backward pass is over: nothing to learn from it."""

    def room(self, trace: Trace) -> int | None:
        """Bytes that may be loaded ahead, or None where no more than usual is known."""
        return None


class AutomaticBudget:
    """As much as the path can hide; see [Note: the automatic budget].

    Args:
        traffic: of the tiers.
        most_backlog: bytes that may wait to be written at most.
    """

    def __init__(self, traffic: Traffic, most_backlog: int) -> None:
        self._traffic = traffic
        self._most_backlog = most_backlog
        self._backlog = min(_FIRST_BACKLOG_BYTES, most_backlog)
        self._limit: float | None = None
        self._was_late = False
        self._growth = _GROWTH
        self._allowance_seconds = 0.0
        self._allowed_seconds = 0.0
        self._soon_seconds = 0.0
        self._observed = 0

    def admits(self, nbytes: int, trace: Trace, idle: float | None) -> bool:
        """Whether an item may leave; may wait a little for the path. See `FixedBudget.admits`."""
        traffic = self._traffic
        if trace.saved_bytes == nbytes:  # a new forward pass
            self._allowed_seconds = self._allowance_seconds
        if self._limit is not None and trace.left_bytes + nbytes > self._limit:
            return False
        if traffic.has_room_in_memory(nbytes):
            return True
        if idle is not None and idle < min(self._soon_seconds, self._round_trip_seconds(nbytes)):
            return False
        room = max(self._backlog, min(2 * nbytes, self._most_backlog)) - nbytes
        if traffic.writing_bytes() <= room:
            return True
        if self._allowed_seconds > 0:
            self._allowed_seconds -= traffic.await_writing_at_most(room, self._allowed_seconds)
        return traffic.writing_bytes() <= room

    def must_leave(self, trace: Trace) -> int | None:
        """Nothing; see `FixedBudget.must_leave`."""
        return 0

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """See `FixedBudget.uses`."""

    def observe(self, trace: Trace) -> None:
        """A backward pass is over: learn how much it can hide."""
        saved, left = trace.saved_bytes, trace.left_bytes
        of_small_pass = min(_SMALL_PASS_BYTES, int(_SMALL_PASS_SHARE * saved))
        rate = self._traffic.rate(write=True)
        if rate is not None:
            of_small_pass = min(of_small_pass, int(rate * _SMALL_PASS_SECONDS))
        share = max(_LEAST_BACKLOG_BYTES, of_small_pass, int(_BACKLOG_SHARE * saved))
        self._backlog = min(share, self._most_backlog)
        allowance = ALLOWANCE * trace.seconds
        self._allowance_seconds = allowance
        self._soon_seconds = _SOON * trace.seconds
        late = trace.waited > allowance
        if late:
            rate = self._traffic.rate(write=False) or left / trace.waited
            lost = min(left, rate * (trace.waited - allowance))
            self._limit = left - (lost if self._was_late else min(lost, _CHANCE * left))
            self._growth = _GROWTH
        elif self._limit is not None:
            self._limit += self._growth * saved
            self._growth *= 2
            if self._limit >= saved:
                self._limit = None
        self._was_late = late

        self._observed += 1
        if self._observed == _SETTLED and left < saved:
            logger.info(
                "activations.budget: auto: %s of %s that are saved in a forward pass leave; the "
                "rest is used too soon, or is more than the tiers take without training waiting "
                "for them.",
                format_size(left),
                format_size(saved),
            )

    def room(self, trace: Trace) -> int | None:
        """See `FixedBudget.room`."""
        return None

    def _round_trip_seconds(self, nbytes: int) -> float:
        write, read = self._traffic.rate(write=True), self._traffic.rate(write=False)
        if not write or not read:
            return 0.0
        return (self._traffic.writing_bytes() + nbytes) / write + nbytes / read


class Budget(Protocol):
    """Decides what leaves, and learns from how that went."""

    def admits(self, nbytes: int, trace: Trace, idle: float | None) -> bool:
        """Whether an item may leave. See `FixedBudget.admits`."""

    def must_leave(self, trace: Trace) -> int | None:
        """See `FixedBudget.must_leave`."""

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """See `FixedBudget.uses`."""

    def observe(self, trace: Trace) -> None:
        """A backward pass is over."""

    def room(self, trace: Trace) -> int | None:
        """See `FixedBudget.room`."""
