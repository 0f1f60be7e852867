"""A process ends although messages of its are under way that will never be over.

[Note: messages that are never over]
After an error this process sends nothing more, and others wait for it; it, in turn, may have begun
to receive what they will not send. Gloo cannot give up such a message, and when the process ends
it waits for each, for as long as the group's timeout (half an hour): the launcher sees no process
that has ended, and the others no connection that is closed. So the process is given some seconds
for what it has to do at its end, and is then ended.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
from collections.abc import Iterable

import torch.distributed as dist

#: For whatever else happens when a process ends, as writing logs.
_GRACE_SECONDS = 5.0

_unfinished: list[dist.Work] = []


def abandon(works: Iterable[dist.Work]) -> None:
    """Let this process end whether or not these messages are over then."""
    if not _unfinished:
        atexit.register(_end_in_time)
    _unfinished.extend(work for work in works if not work.is_completed())


def _end_in_time() -> None:
    if all(work.is_completed() for work in _unfinished):
        return
    # A thread that needs no interpreter: what waits may be the last of its clearing up.
    nowhere = open(os.devnull, "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(_GRACE_SECONDS, exit=True, file=nowhere)
