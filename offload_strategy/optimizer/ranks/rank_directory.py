"""Host and process of each rank, so that an error can name the ranks that have ended.

When a rank dies, the others see what their transport saw: "Connection closed by peer", with an
address that identifies no rank, and the last of them see it of ranks that were well until they got
such an error themselves. Most often that happens in backward, within the reduction and not in our
code: so `sys.excepthook` adds the note to errors that nobody has caught.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from timeit import default_timer as perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

#: A process that is killed closes its connections shortly before it counts as ended; one that ends
#: by an error of its own closes everything else in between, on a busy machine for seconds.
_PATIENCE_SECONDS = 5.0
#: What errors of a transport have in their text.
_TRANSPORTS = ("gloo", "NCCL", "peer")
_NOTE = "ssd-offload: a rank cannot be reached:"

_directories: weakref.WeakSet[RankDirectory] = weakref.WeakSet()


class RankProcess(NamedTuple):
    """One rank's process."""

    machine: str
    host: str
    pid: int


class RankDirectory:
    """The processes of a group's ranks. All ranks have to make one at the same time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:  # containers of one host may have numbers of their own for processes
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            machine = platform.node()
        own = RankProcess(machine, platform.node(), os.getpid())
        ranks = dist.get_process_group_ranks(group)
        members: list[Any] = [None] * len(ranks)
        dist.all_gather_object(members, own, group=group)
        self._processes: dict[int, RankProcess] = dict(zip(ranks, members, strict=True))
        #: Whether all of them are on one machine, and see each other's processes there.
        self.on_one_machine = all(each.machine == own.machine for each in members)
        #: Those on this machine; None for one that has ended already.
        self._local: dict[int, psutil.Process | None] = {}
        for rank, member in self._processes.items():
            if member.machine == own.machine and member.pid != own.pid:
                try:
                    self._local[rank] = psutil.Process(member.pid)
                except psutil.Error:
                    self._local[rank] = None
                except OSError:  # without a free descriptor it is not watched
                    continue
        _directories.add(self)
        _install()

    def ended(self) -> list[int]:
        """The ranks whose processes are on this machine and have ended."""
        return sorted(rank for rank, process in self._local.items() if _has_ended(process))

    def add_rank_note(self, error: BaseException) -> None:
        """Add a note to an error of the transport that names the ranks that are gone."""
        has_note = any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
        of_transport = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORTS)
        )
        if has_note or not of_transport:
            return
        deadline = perf_counter() + _PATIENCE_SECONDS
        while not (ended := self.ended()) and self._local and perf_counter() < deadline:
            time.sleep(0.02)
        if ended:
            named = ", ".join(
                f"rank {each} (process {self._processes[each].pid})" for each in ended
            )
            error.add_note(
                f"{_NOTE} {named} {'has' if len(ended) == 1 else 'have'} ended on {platform.node()}"
                f". See what each printed; one that printed no error was killed, by the system if "
                f"memory was short (`dmesg` tells). Start all ranks again from the last checkpoint."
            )
            return
        others = [
            f"rank {rank} on {member.host}"
            for rank, member in self._processes.items()
            if rank not in self._local and member.pid != os.getpid()
        ]
        if others:
            error.add_note(
                f"{_NOTE} the ranks on this machine ({platform.node()}) run; see what became of "
                f"{', '.join(others)}."
            )


def _has_ended(process: psutil.Process | None) -> bool:
    try:
        return not (process and process.is_running()) or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
    except OSError:  # there is no free descriptor to look
        return False


@cache
def _install() -> None:
    """Explain errors that nobody catches, before they are printed."""
    previous: Callable[..., Any] = sys.excepthook

    def with_note(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        for directory in list(_directories):
            directory.add_rank_note(error)
        previous(kind, error, traceback)

    sys.excepthook = with_note
