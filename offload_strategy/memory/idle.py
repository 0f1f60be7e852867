"""How much idle memory stays mapped: as much as makes the process no larger than it gets anyway.

[Note: idle memory and peaks]
Buffers are for backward, and memory is often at its peak where forward ends: idle buffers that stay
mapped then raise the peak. To give them back in every step, though, has its price: fresh memory is
zeroed by the kernel when it is used again. So the process is looked at whenever memory is given or
asked for, and what it had beside idle buffers is what it needed. While it is smaller than what it
needed in one of the last steps, idle buffers stay; beyond that they go. The peak may be higher by
what is made between two looks.
"""

from __future__ import annotations

import os
import time
from collections import deque

from offload_strategy.memory.pool import BufferPool
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
        self._needs: deque[int] = deque(maxlen=_PASSES)
        self._need = self._most = 0
        self._look_at = 0.0

    def pass_begins(self) -> None:
        """A forward pass begins."""
        self._needs.append(self._need)
        self._most = max(self._needs)
        self._need = 0
        if resident_bytes() is None:
            self._pool.trim()
        self.look()

    def look(self) -> None:
        """Give idle memory back if there is too much of it."""
        now = time.perf_counter()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        idle, resident = self._pool.idle_bytes(), resident_bytes()
        if resident is None:
            return
        self._need = max(self._need, resident - idle)
        excess = resident - self._most
        if excess > 0 and idle:
            self._pool.trim(idle - excess)
