"""A limit for idle buffers: they must not make the process larger than it gets anyway.

[Note: idle memory and peaks]
Memory is often at its peak when forward ends, and idle buffers that stay mapped then raise it; but
the kernel zeroes what is unmapped when it is used again. So resident memory is measured
whenever a buffer is acquired or released; without idle buffers it is what the process needs. Idle
buffers stay mapped as long as the process is smaller than what it needed in one of the last steps
or in this one, or than the limit of training, if it has one. In a forward pass, the largest growth
between two measurements counts in advance: while a loss is computed from large logits, no buffer is
acquired or released.

What may wait in memory or on a tier, as new weights do until `step()`, stays in memory while the
process takes little more than it needs otherwise, or where memory is scarce, most of its limit
(`IdleLimit.has_room`). At the end of backward, what autograd saved is gone.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from timeit import default_timer as perf_counter

from offload_strategy.host_memory.c_allocator import freed_memory
from offload_strategy.host_memory.memory_limits import resident_bytes

#: Number of passes that are remembered: of several micro-batches the last one needs most.
_PASSES = 8
#: More frequent measurements are of no use.
_LOOK_SECONDS = 0.001
#: How long it is known how much may wait: the C library walks through all that is free to tell it,
#: at every update, and a backward pass has hundreds.
_ROOM_SECONDS = 0.05
#: Share by which what waits in memory may raise the memory in use, and share of the limit up to
#: which it may: the heap has gaps besides. Where memory is scarce, only the third one counts.
WAITING_SHARE, IN_USE_SHARE, SCARCE_SHARE = 0.5, 0.75, 0.85
#: Shares of its limit from which a process returns freed memory: if memory grows fast, and always.
_NEAR_SHARE, RETURN_SHARE = 0.9, 0.95
#: Share of its limit that a process may come to by what grows before the next look.
FULL_SHARE = 0.98
#: By what a growth counts less at each later look: a pass has hundreds.
_FORGETTING = 0.9998
#: Share of the time that this may take if not enough can be returned.
_TRIMMING_SHARE = 0.05


class TrimmingNearLimit:
    """Returns freed memory to the system while the process is near a limit.

    glibc keeps freed tensors of up to 32 MiB for later requests, and their sizes fragment it: a
    process that offloads had a third more in memory than it used. What is returned has page faults
    when it is used again (a quarter of the step's time if everything is), so this happens only if
    the process is so close to its limit that it may come to it before the next look.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._near = int(_NEAR_SHARE * limit_bytes)
        self._close = int(RETURN_SHARE * limit_bytes)
        self._most = int(FULL_SHARE * limit_bytes)
        self._look_at = 0.0
        # Resident memory when it was looked at last, and the most by which it has grown since such
        # a look, which is forgotten over some passes.
        self._latest = sys.maxsize
        self._growth = 0.0

    def look(self) -> None:
        """Return freed memory if it is time to."""
        begin = perf_counter()
        if begin < self._look_at:
            return
        self._look_at = begin + _LOOK_SECONDS
        resident = resident_bytes()
        self._growth = max(resident - self._latest, _FORGETTING * self._growth)
        self._latest = resident
        if resident > max(self._near, min(self._close, self._most - self._growth)):
            freed_memory.return_all()
            self._latest = resident_bytes()
            end = perf_counter()
            # What cannot be returned would be looked for again and again.
            pause = (end - begin) / _TRIMMING_SHARE if self._latest > self._near else 0.0
            self._look_at = end + max(_LOOK_SECONDS, pause)


class IdleLimit:
    """How much idle memory would raise the peak of the process; the pool's lock guards it."""

    def __init__(self) -> None:
        # Of each pass: the peak of what was needed, and its largest growth between two
        # measurements until backward acquires buffers.
        self.passes: deque[tuple[int, int]] = deque(maxlen=_PASSES)
        self._need = self._growth = self._latest = 0
        # The largest peak of these passes; it is asked for at every buffer.
        self._most_before = 0
        self._in_forward = False
        self._look_at = 0.0
        #: Bytes by which idle memory may raise the memory of the process.
        self.may_exceed = 0
        #: Bytes that the process may have in memory, none before that is known; and whether it may
        #: use all of them, because training does not fit in there otherwise.
        self.process_bytes, self.is_scarce = 0, False
        #: Bytes that stay in memory because there was room, and the most in use besides those.
        self.waiting = 0
        self._most_in_use = 0
        # Bytes that may wait besides, and until when this is known.
        self._room, self._room_until = 0, 0.0

    @property
    def needed_bytes(self) -> int:
        """The most that the process needed without idle memory, in one of the last passes."""
        return max(self._need, self._most_before)

    def pass_begins(self) -> None:
        """Start a pass, once before buffers are acquired."""
        if not self._in_forward:
            self.passes.append((self._need, self._growth))
            self._most_before = max(peak for peak, _ in self.passes)
            self._need = self._growth = self._latest = 0
            self._in_forward = True
        self._look_at = 0.0

    def excess(self, idle_bytes: Callable[[], int], *, acquires: bool) -> int:
        """Return how many bytes the process has too much, of which so many are idle."""
        now = perf_counter()
        if not self.passes or (now < self._look_at and not (acquires and self._in_forward)):
            return 0
        self._look_at = now + _LOOK_SECONDS
        idle, resident = idle_bytes(), resident_bytes()
        need, latest = resident - idle - self.waiting, self._latest
        self._need, self._latest = max(self._need, need), need
        limit = self.needed_bytes + self.may_exceed
        if self.is_scarce:
            limit = max(limit, int(RETURN_SHARE * self.process_bytes))
        if self._in_forward:
            self._growth = max(self._growth, need - latest if latest else 0)
            self._in_forward = not acquires
        growth = max(growth for _, growth in self.passes) if self._in_forward else 0
        if idle and growth and need + idle + growth > limit:
            # It finds a place in freed memory first, of which parts are too small.
            growth = max(0, growth - freed_memory.nbytes() // 2)
        return max(0, need + idle + growth - limit)

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait in memory, which then do."""
        now = perf_counter()
        if now >= self._room_until:
            self._room, self._room_until = self._measure_room(), now + _ROOM_SECONDS
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True

    def _measure_room(self) -> int:
        resident = resident_bytes()
        freed = freed_memory.nbytes()
        in_use = resident - freed
        self._most_in_use = max(self._most_in_use, in_use - self.waiting)
        most = SCARCE_SHARE * self.process_bytes
        if not self.is_scarce:
            most = min((1 + WAITING_SHARE) * self._most_in_use, IN_USE_SHARE * self.process_bytes)
        room = int(most) - in_use
        if resident > _NEAR_SHARE * self.process_bytes:
            # Only what finds its place in freed memory, of which parts are too small.
            room = min(room, freed // 2)
        return room

    def acquired(self, nbytes: int) -> None:
        """Count a buffer that was acquired after a measurement as needed."""
        if self.passes:
            self._latest += nbytes
            self._need = max(self._need, self._latest)
