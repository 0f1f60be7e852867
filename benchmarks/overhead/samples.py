"""Samples of a process by `perf record`, and what its processors did by kind of work.

[Note: kinds of work]
A sample is a moment at which a thread ran on a processor: the number of samples over their
frequency is processor time. In the kernel, what matters is how a thread got there (a page fault, a
system call), which is the outermost symbol of the stack that names one. Outside of it, the library
and the function that ran tell what was done. Threads are those that train (the main thread; on the
CPU it runs backward as well, and OpenMP's help it, which run no Python) and those for I/O.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Samples per second of each processor; not a divisor of anything that happens regularly.
FREQUENCY = 499
_TRAINS, _IO = "training", "I/O threads"

COMPUTING = "forward, backward and the optimizer's arithmetic"
#: Kinds of work in the order of the table, each with what it looks for in `library:function`, or
#: in the names of a kernel stack.
_KERNEL = {
    "page faults": r"exc_page_fault|do_user_addr_fault",
    "giving memory back": r"sys_munmap|sys_madvise|sys_brk|sys_mremap|sys_mmap|sys_mprotect",
    "reading and writing files": r"sys_p?(read|write)v?(64|2)?\b|sys_io_|io_uring|ksys_|vfs_",
    "waiting for locks, and waking": r"futex|sys_sched_yield|schedule|clock_nanosleep|sys_poll",
    "other work of the kernel": r"",
}
_USER = {
    "checksums": r"xxhash|XXH",
    "copies": r"mem(cpy|move|set)|:.*copy_|copy_kernel|direct_copy",
    "allocator": r"libc.*:.*(malloc|free|memalign|realloc|calloc|sysmalloc|trim|unlink_chunk)",
    "OpenMP's barriers": r"lib(g|i)omp",
    "Python": r"libpython|python3|\.cpython-|_pydatetime",
    "locks": r"pthread|lll_lock|sem_",
    COMPUTING: r"",
}
KINDS = (*_USER, *_KERNEL)
_HEADER = re.compile(r"^\S.*?\s+(\d+)/(\d+)\s+[\d.]+:")


@dataclass
class Work:
    """Seconds of processor time by thread group and kind."""

    seconds: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, kind: str) -> float:
        """Seconds of a kind, in all threads."""
        return sum(value for (_, each), value in self.seconds.items() if each == kind)

    @property
    def training(self) -> float:
        """Seconds of the threads that train."""
        return sum(value for (group, _), value in self.seconds.items() if group == _TRAINS)

    @property
    def total(self) -> float:
        """Seconds of all threads."""
        return sum(self.seconds.values())


class Recording:
    """Samples a process from now on.

    Args:
        pid: of the process.
        file: for the samples.
    """

    def __init__(self, pid: int, file: Path) -> None:
        self._pid, self._file = pid, file
        # All processes: told of one, perf itself takes a core as soon as one of its threads ends.
        command = ["perf", "record", "-q", "-a", "-F", str(FREQUENCY), "-g", "-o", str(file)]
        self._perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(0.2)  # until it has begun

    def end(self) -> Work:
        """Stop, and tell what was done. Raises RuntimeError if perf could not sample."""
        self._perf.send_signal(signal.SIGINT)
        errors = self._perf.communicate(timeout=60)[1].decode()
        if not self._file.exists() or not self._file.stat().st_size:
            raise RuntimeError(f"perf record: {errors.strip()[-500:]}")
        command = ["perf", "script", "-i", str(self._file), "-F", "comm,pid,tid,time,ip,sym,dso"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as script:
            assert script.stdout is not None
            work = _count(_stacks(script.stdout, self._pid), self._pid)
        self._file.unlink()
        return work


def why_not() -> str | None:
    """Why processes cannot be sampled here; None if they can."""
    if shutil.which("perf") is None:
        return "there is no `perf` (package linux-perf or linux-tools)"
    done = subprocess.run(
        ["perf", "record", "-q", "-a", "-o", "/dev/null", "-F", "99", "-g", "--", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return None if done.returncode == 0 else f"perf record: {done.stderr.strip()[-200:]}"


def _stacks(lines: Iterator[str], pid: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the thread and the frames, innermost first, as `library:function`, of a process."""
    process, thread, frames = 0, 0, list[str]()
    for line in lines:
        if not line.strip():
            if frames and process == pid:
                yield thread, frames
            frames = []
        elif header := _HEADER.match(line):
            process, thread = int(header[1]), int(header[2])
        else:
            _, _, rest = line.strip().partition(" ")
            function, _, library = rest.rpartition(" (")
            frames.append(f"{library.rstrip(')').rpartition('/')[2]}:{function}")


def _count(stacks: Iterator[tuple[int, list[str]]], pid: int) -> Work:
    counts: Counter[tuple[int, str]] = Counter()
    with_python: set[int] = {pid}
    for thread, frames in stacks:
        counts[thread, _kind(frames)] += 1
        if any(re.search(_USER["Python"], frame) for frame in frames):
            with_python.add(thread)
    work = Work()
    for (thread, kind), count in counts.items():
        group = _IO if thread != pid and thread in with_python else _TRAINS
        work.seconds[group, kind] += count / FREQUENCY
    return work


def _kind(frames: list[str]) -> str:
    if "[kernel" in frames[0] or frames[0].startswith("[unknown"):
        entered = " ".join(frame for frame in frames if "[kernel" in frame)
        return next(kind for kind, names in _KERNEL.items() if re.search(names, entered))
    return next(kind for kind, names in _USER.items() if re.search(names, frames[0]))
