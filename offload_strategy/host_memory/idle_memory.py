"""How much idle memory stays mapped: as much as makes the process no larger than it gets anyway.

[Note: idle memory and peaks]
Buffers are for backward, and memory is often at its peak where forward ends: idle buffers that stay
mapped then raise the peak. To give them back in every step, though, has its price: fresh memory is
zeroed by the kernel when it is used again. So the process is looked at whenever memory is given or
asked for, and what it had beside idle buffers, and what is lent thereupon, is what it needed. While
it is smaller than what it needed in one of the last steps or in this one, idle buffers stay; beyond
that they go. In a forward pass what it may need until the next look, as much as it ever grew from
one to the next, counts as needed already: where a loss is computed from large logits, nothing is
given or asked for meanwhile. Who reads and writes much in turns says how much idle memory may come
on top: what one of its turns gives back is what its next one asks for.
"""

from __future__ import annotations

import os
import time
from collections import deque

from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import PAGE_BYTES

#: So many passes are remembered: steps of several micro-batches need most in the last of them.
_PASSES = 8
#: To look takes some ten microseconds, and is of no use more often than this.
_LOOK_SECONDS = 0.001


def resident_bytes() -> int | None:
    """Memory of this process, or None where the system does not tell at once."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        return int(os.read(file, 128).split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(file)


class IdleMemory:
    """Gives idle memory of a pool back where it would raise the peak of the process.

    Args:
        pool: whose.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        # Of each pass: what was needed at most, and the most by which that grew from one look to
        # the next up to where backward asks for buffers.
        self._passes: deque[tuple[int, int]] = deque(maxlen=_PASSES)
        self._most = self._need = self._growth = self._latest = 0
        self._in_forward = False
        self._look_at = 0.0
        self._beyond = 0

    def may_exceed(self, nbytes: int) -> None:
        """Idle memory may make the process larger by so many bytes than it needs."""
        self._beyond = max(self._beyond, nbytes)

    def pass_begins(self) -> None:
        """A forward pass begins, or is about to: told twice before a buffer is lent it is one."""
        if resident_bytes() is None:
            self._pool.trim()
            return
        if not self._in_forward:
            self._passes.append((self._need, self._growth))
            self._most = max(need for need, _ in self._passes)
            self._need = self._growth = self._latest = 0
            self._in_forward = True
        self._look_at = 0.0
        self.look()

    def look(self, *, acquires: bool = False) -> None:
        """Give idle memory back if there is too much of it; before the first pass there is not.

        Args:
            acquires: whether a buffer is about to be lent.
        """
        now = time.perf_counter()
        if not self._passes or (now < self._look_at and not (acquires and self._in_forward)):
            return
        self._look_at = now + _LOOK_SECONDS
        idle, resident = self._pool.idle_bytes(), resident_bytes()
        if resident is None:
            return
        need, latest = resident - idle, self._latest
        self._need, self._latest = max(self._need, need), need
        limit = max(self._most, self._need) + self._beyond
        if self._in_forward:
            self._growth = max(self._growth, need - latest if latest else 0)
            self._in_forward = not acquires
        if self._in_forward:
            limit -= max(growth for _, growth in self._passes)
        excess = resident - limit
        if excess > 0 and idle:
            self._pool.trim(idle - excess)

    def acquired(self, nbytes: int) -> None:
        """A buffer of so many bytes was lent after a look: they are needed, too."""
        if self._passes:
            self._latest += nbytes
            self._need = max(self._need, self._latest)
