"""When a queue may read from a path that other processes use too.

[Note: turns are for reads]
Processes that read at once share the bandwidth, and whatever one of them waits for takes as many
times longer as there are processes: in turns, the sum is the same and each read takes its own
time. Nobody waits for a write, so it gains nothing by a turn; and a path that reads and writes at
once has more bandwidth than either alone, of which one process at a time would leave unused what
it has nothing to write for.
"""

from __future__ import annotations

from collections.abc import Callable

from offload_strategy.io.backends.thread_pool import Workers
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB

logger = get_logger(__name__)

#: A turn ends with the moves that were begun before this many bytes were.
TURN_BYTES = 64 * MiB


class TurnKeeper:
    """The state of one queue's turn: not needed, asked for, or held. Guarded by the queue's lock.

    Args:
        turns: the lock shared with other processes.
        granted: called on a thread of this object, without the queue's lock, when a turn begins;
            it must call `grant` under the lock.
    """

    def __init__(self, turns: PathLock, granted: Callable[[], None]) -> None:
        self._turns = turns
        self._granted = granted
        self._thread = Workers("ssd-offload-turn", 1)
        self._asking = False
        self._closed = False
        self.held = False
        self._left = 0

    def may_begin(self, *, new: bool) -> bool:
        """Whether a block may begin; asks for a turn if one is needed.

        Args:
            new: the block is the first of its move. A move that has begun is never cut in two.
        """
        if self.held:
            return self._left > 0 or not new
        if not self._turns.others():
            return True
        if not self._asking and not self._closed:
            self._asking = True
            self._thread.submit(self._ask)
        return False

    def began(self, nbytes: int) -> None:
        """Count bytes against the turn."""
        self._left -= nbytes

    def grant(self) -> None:
        """The turn begins."""
        self._asking = False
        self.held = True
        self._left = TURN_BYTES

    def give_back(self) -> None:
        """The turn ends; to be called when nothing is under way."""
        if self.held:
            self.held = False
            self._turns.release()

    def close(self) -> None:
        """End the thread; one that still waits for another process ends when that lets go."""
        self._closed = True
        self._thread.close(timeout=5.0)
        self.give_back()

    def _ask(self) -> None:
        try:
            self._turns.acquire()
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            if not self._closed:
                logger.warning(
                    "%s: processes do not take turns there (%s); going on without",
                    self._turns.path,
                    error,
                )
        self._granted()
