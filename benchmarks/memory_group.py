"""Processes that may have only so much memory: groups of the memory controller, version 1.

    with memory_group(limit=1 << 30) as group:
        subprocess.run(group.command([sys.executable, "-m", "..."]))
        print(group.peak_bytes())

What counts is what the system charges to the group: memory of its processes, and pages of files
that they read or wrote first. A group that has no more than it is given takes pages of files back
from itself, and when that is not enough the system kills (SIGKILL). Needs root, as `why_not` tells.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_MEMORY = Path("/sys/fs/cgroup/memory")
#: How long a group that is still in use is waited for.
_PATIENCE_SECONDS = 10.0


def why_not() -> str | None:
    """Why there can be no such groups here, or None if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "memory groups need root"
    if not (_MEMORY / "memory.limit_in_bytes").exists():
        return f"there is no memory controller of cgroup version 1 at {_MEMORY}"
    return None


class MemoryGroup:
    """A group of processes. Made by `memory_group`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs another one in the group, from its first page on."""
        procs = str(self._folder / "cgroup.procs")
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', procs, *command]

    def peak_bytes(self) -> int:
        """The most that the group had at once, pages of files included."""
        return int((self._folder / "memory.max_usage_in_bytes").read_text())

    def times_at_the_limit(self) -> int:
        """How often the group wanted more than its limit, and had to give pages back first."""
        return int((self._folder / "memory.failcnt").read_text())


@contextlib.contextmanager
def memory_group(limit: int | None = None) -> Iterator[MemoryGroup]:
    """A new group, with a limit in bytes or without; its processes must end before it does."""
    folder = Path(tempfile.mkdtemp(prefix="offload-memory-", dir=_MEMORY))
    try:
        if limit is not None:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
        yield MemoryGroup(folder)
    finally:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while folder.exists():
            with contextlib.suppress(OSError):
                # Pages of files that are charged to it must go, or go to the group above.
                (folder / "memory.force_empty").write_text("0")
            try:
                folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
