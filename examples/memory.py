"""How much memory this process needs: its peak above what the imported libraries take."""

import ctypes
import sys
from pathlib import Path

MALLOC_THRESHOLD_BYTES = 64 * 1024
_M_MMAP_THRESHOLD = -3  # <malloc.h>


def give_freed_memory_back() -> str:
    """Make glibc return each freed tensor to the system at once, so that a peak means something.

    By default glibc keeps freed memory for later in ever larger heaps, and the peak of a process
    tells how these happened to grow as much as what was needed at a time. Call it first of all, and
    alike in every process that is compared.

    Returns:
        A phrase that says what was set.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "gnu_get_libc_version"):
            libc.mallopt(_M_MMAP_THRESHOLD, MALLOC_THRESHOLD_BYTES)
            return f"glibc's mmap threshold fixed at {MALLOC_THRESHOLD_BYTES // 1024} KiB"
    return "the allocator as it is"


class PeakMemory:
    """Peak resident memory since it was made; NaN where the system does not tell (not Linux)."""

    def __init__(self) -> None:
        self._before = _status_bytes("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc_pid_status(5)
        except OSError:
            self._before = float("nan")

    def bytes(self) -> float:
        """Return the peak above the level at the start, in bytes."""
        return _status_bytes("VmHWM") - self._before


def _status_bytes(key: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))
