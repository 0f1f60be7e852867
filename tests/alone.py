"""Tests that measure time run alone, also when several processes share the tests among them.

`make test` runs pytest-xdist's workers side by side. Every worker takes part in one lock: a test
holds it together with others, one that is marked as `alone` holds it for itself.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

# Files that are there anyway: their locks are the kernel's, and end with the process.
_DOOR = Path(__file__)
_ROOM = Path(__file__).with_name("conftest.py")


@contextlib.contextmanager
def in_the_room(*, alone: bool) -> Iterator[None]:
    """Wait until a test may run, beside those of other workers or alone, and hold the room then."""
    # Whoever waits for an empty room stands in the door, so that nobody else comes in.
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with _held(_DOOR, fcntl.LOCK_EX) as door, _held(_ROOM, kind):
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def _held(path: Path, kind: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, kind)
        yield fd
    finally:
        # Said, not left to the closing: a child that a test forked may have the file open still.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
