"""How much of what is saved may leave: a given amount, what the path can hide, what drives allow.

[Note: the automatic budget]
Three rules, of which each sees what the others cannot:

- *What is used soon stays.* An item is kept if the way out and back takes longer than it lies
  unused (as learned): what backward needs first, above all.
- *A path that is behind gets no more.* Items are kept while more than a share of a step's bytes
  waits to be written. Waiting a little buys a lot of memory where the path keeps pace on average:
  forward may wait for `ALLOWANCE` of a step's time. On the way from a device to host memory items
  are kept while as much is to be copied as the device may have before it waits for the copies.
- *What backward had to wait for was too much.* Next time less may leave, by what the path reads in
  the time that was lost: all of that if the pass before waited too; the first time may be chance
  (another process, a disk that paused), so that most stays allowed. Later more again, ever sooner.

What stays by these rules leaves all the same if there is no memory for it: training waits then.

[Note: writes per day]
All that is written counts, over the whole run. At the start of a forward pass activations get what
the budget allows until its end (it takes as long as the one before), less what was written and what
states and weights write in the mean of all passes. What is not used in a pause may be used later.
The first pass writes all that it may. What memory has no room for is written all the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from timeit import default_timer as perf_counter

import torch

from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.tier_writes import CLIENT, TierWrites
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.telemetry import Direction, get_logger
from offload_strategy.units import SECONDS_PER_DAY, MiB, format_size

logger = get_logger(__name__)

#: Share of a step's time that training may wait for activations.
ALLOWANCE = 0.01
#: Share of a step's bytes that may wait to be written, and the least that may. A small pass gives
#: away a larger share at once (see [Note: batches]), and what is behind such a batch must not be
#: held up, if the path takes it in within so many seconds.
_BACKLOG_SHARE = 0.06
_SMALL_PASS_SHARE, _SMALL_PASS_BYTES = 0.15, 96 * MiB
_SMALL_PASS_SECONDS = 0.06
_LEAST_BACKLOG_BYTES = 32 * MiB
#: Until a step was seen whole.
_FIRST_BACKLOG_BYTES = 64 * MiB
#: Share of a step's time within which an item may be used so soon that it had better stay. Without
#: a bound, a path that was slow once would never be tried again.
_SOON = 0.1
#: Round trips over the link of a device that an item must be unused: others are on their way, too.
_MARGIN = 1.5
#: Share of what left by which one late pass lowers the limit at most.
_CHANCE = 0.2
#: By how much a limit grows in a step that had no need to wait; twice as much after each further.
_GROWTH = 0.02
#: Steps after which the amount is told.
_SETTLED = 5
#: Share of the memory that was free at most, which what stays by a budget may take (the rest is for
#: what backward needs besides), and by what that counts less at each later look.
_KEPT_SHARE, _FORGETTING = 0.7, 0.98
#: So many stay without a look at the memory, which takes a fraction of a millisecond.
_UNMEASURED_BYTES = 32 * MiB


class Budget:
    """Decides which items are offloaded: so many bytes (int) or such a share of a forward pass."""

    def __init__(self, budget: int | float | None = None) -> None:
        self._budget = budget

    def admits(
        self, nbytes: int, trace: Trace, idle: float | None, leaves_after: float | None = None
    ) -> bool:
        """Return whether an item is offloaded; may wait for room in memory or on the path.

        Its bytes are among the saved ones of the trace already. It will be unused for `idle`
        seconds, and can leave so many seconds after the first item was saved; None if unknown.
        """
        limit = self._budget
        if isinstance(limit, float):
            limit *= trace.saved_bytes
        return limit is None or trace.left_bytes + nbytes <= limit

    def may_stay(self, trace: Trace) -> bool:
        """Return whether memory has room for the latest item, which was admitted."""
        return True

    def must_leave(self, trace: Trace) -> int | None:
        """Return how many bytes in flight must be written although backward starts; None: all."""
        return None

    def uses(self, trace: Trace, loaded_bytes: int, nbytes: int) -> None:
        """Note the first use of an item of so many bytes, with those of others loaded again."""

    def observe(self, trace: Trace) -> None:
        """Note that the backward of a pass has ended, or was launched."""

    def learn(self, trace: Trace) -> None:
        """Learn from the times of such a pass, once the device has told them."""

    def room(self, trace: Trace) -> int | None:
        """Return the bytes that may be prefetched, or None for the usual amount."""
        return None


class AutomaticBudget(Budget):
    """As much as the path can hide; see [Note: the automatic budget]."""

    def __init__(self, writes: TierWrites, most_backlog: int) -> None:
        super().__init__()
        self._writes = writes
        self._most_backlog = most_backlog
        self._backlog = min(_FIRST_BACKLOG_BYTES, most_backlog)
        self._limit: float | None = None
        self._was_late = False
        self._growth = _GROWTH
        # Seconds of the last step, and those that the current pass may still wait.
        self._step_seconds = self._allowed_seconds = 0.0
        self._observed = 0
        # On a device: what will wait to leave, by the end of its copy or write in seconds after the
        # first save of a pass, and its bytes.
        self._expected: deque[tuple[float, int]] = deque()
        self._expected_bytes = 0

    def admits(
        self, nbytes: int, trace: Trace, idle: float | None, leaves_after: float | None = None
    ) -> bool:
        """See `Budget.admits`; waits a little for the path."""
        writes = self._writes
        if trace.saved_bytes == nbytes:  # a new forward pass
            self._allowed_seconds = ALLOWANCE * self._step_seconds
            self._expected.clear()
            self._expected_bytes = 0
        if self._limit is not None and trace.left_bytes + nbytes > self._limit:
            return False
        if trace.on_device:
            return self._admits_on_device(nbytes, trace, idle, leaves_after)
        if writes.has_room_in_memory(nbytes):
            return True
        backlog = writes.store.registry.writing_bytes
        if self._is_used_soon(nbytes, backlog, idle):
            return False
        room = self._room(nbytes)
        if backlog <= room:
            return True
        if self._allowed_seconds > 0:
            begin = perf_counter()
            writes.store.await_writes(CLIENT, room, self._allowed_seconds)
            waited = perf_counter() - begin
            self._allowed_seconds -= waited
            trace.held += waited
        return writes.store.registry.writing_bytes <= room

    def _is_used_soon(self, nbytes: int, backlog: int, idle: float | None) -> bool:
        write, read = self._writes.rate(write=True), self._writes.rate(write=False)
        if idle is None or not write or not read:
            return False
        return idle < min(_SOON * self._step_seconds, (backlog + nbytes) / write + nbytes / read)

    def _room(self, nbytes: int) -> int:
        """Return the bytes that may wait to be written before an item of so many."""
        return max(self._backlog, min(2 * nbytes, self._most_backlog)) - nbytes

    def _admits_on_device(
        self, nbytes: int, trace: Trace, idle: float | None, leaves_after: float | None
    ) -> bool:
        """Go by what the device will do: the host is ahead, and nothing of it has happened yet."""
        link = self._writes.copy_rate()
        if leaves_after is None or link is None:
            trace.is_trial = True  # it moves what it can, and is timed
            return True
        while self._expected and self._expected[0][0] <= leaves_after:
            self._expected_bytes -= self._expected.popleft()[1]
        backlog, write = self._expected_bytes, link  # of items that will not have left by then
        if self._writes.has_room_in_memory(nbytes):  # until it is copied, the device has it
            room = self._writes.copy_window() - nbytes
            soon = idle is not None and idle < _MARGIN * (backlog + 2 * nbytes) / link
        else:
            room, soon = self._room(nbytes), self._is_used_soon(nbytes, backlog, idle)
            write = min(link, self._writes.rate(write=True) or 0.0)
        if soon or backlog > room:
            return False
        begin = max(leaves_after, self._expected[-1][0] if self._expected else 0.0)
        self._expected.append((begin + nbytes / write if write else math.inf, nbytes))
        self._expected_bytes += nbytes
        return True

    def must_leave(self, trace: Trace) -> int | None:
        """On the CPU, what is in flight when backward starts stays. See `Budget.must_leave`."""
        # When the host launches backward, a device has not even produced what is in flight.
        return None if trace.on_device else 0

    def learn(self, trace: Trace) -> None:
        """Learn how much a backward pass can hide."""
        saved, left = trace.saved_bytes, trace.left_bytes
        rate = self._writes.rate(write=True) or math.inf
        small_pass = min(_SMALL_PASS_BYTES, _SMALL_PASS_SHARE * saved, rate * _SMALL_PASS_SECONDS)
        backlog = int(max(_LEAST_BACKLOG_BYTES, small_pass, _BACKLOG_SHARE * saved))
        self._backlog = min(backlog, self._most_backlog)
        self._step_seconds = trace.seconds
        allowance = ALLOWANCE * trace.seconds
        late = trace.waited > allowance and not trace.is_trial
        if late:
            # Without a known rate (host memory): it moved at least all of it in about half a step.
            rate = self._writes.rate(write=False) or 2 * left / trace.seconds
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
                f"activations.budget: auto: {format_size(left)} of {format_size(saved)} that are "
                "saved in a forward pass leave; the rest is used too soon, or is more than the "
                "tiers take without training waiting for them."
            )


class WriteBudget:
    """Decides what may be written within `per_day` bytes of each tier by its name."""

    def __init__(self, per_day: Mapping[str, int], store: TensorStore) -> None:
        self._rates = {tier: nbytes / SECONDS_PER_DAY for tier, nbytes in per_day.items()}
        self._store = store
        self._started_at = self._pass_began = perf_counter()
        self._passes = 0
        self._room = math.inf

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        now, passes = perf_counter(), self._passes
        until = 2 * now - self._pass_began - self._started_at
        self._pass_began, self._passes = now, passes + 1
        recorder, waiting = self._store.recorder, self._store.registry.writing_bytes
        own = recorder.client_bytes["activations", "written"]
        if passes:
            written = {
                tier: recorder.tier_bytes[tier, Direction.WRITE] + waiting for tier in self._rates
            }
            self._room = min(
                rate * until - written[tier] - max(0, written[tier] - own) / passes
                for tier, rate in self._rates.items()
            )

    def admits(self, nbytes: int) -> bool:
        """Return whether an item may be written, and count it if so."""
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True


class FreeMemory:
    """Memory for what stays in a forward pass although it would leave if that cost nothing.

    What is free of each device, but for a share of the most that was free lately.
    """

    def __init__(self, free_bytes: Callable[[torch.device], int]) -> None:
        self._free_bytes = free_bytes
        self._unmeasured = 0
        self._most: dict[torch.device, float] = {}
        # What is left in this pass, once it is known.
        self._rooms: dict[torch.device, float] = {}

    def begin_pass(self) -> None:
        """Note that a forward pass begins."""
        self._rooms.clear()

    def takes(self, nbytes: int, device: torch.device) -> bool:
        """Return whether so many bytes more may stay, and count them."""
        room = self._rooms.get(device)
        if room is None:
            self._unmeasured += nbytes
            if self._unmeasured <= _UNMEASURED_BYTES:
                return True
            self._unmeasured, free = 0, self._free_bytes(device)
            most = self._most[device] = max(free, _FORGETTING * self._most.get(device, 0))
            room = free - (1 - _KEPT_SHARE) * most
        self._rooms[device] = room - nbytes if nbytes <= room else room
        return nbytes <= room
