"""What the figures of a benchmark depend on, and how benchmarks tell what they are doing."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_strategy.units import KiB, MiB, format_size

_M_MMAP_THRESHOLD = -3
#: Else freed memory stays in glibc's store, and the next step's peak is hidden in the level.
_MMAP_THRESHOLD = 64 * KiB
#: What `fix_allocator` does, in the environment of processes that cannot call it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)}


def describe_machine(directory: Path) -> dict[str, Any]:
    """What the figures depend on.

    Args:
        directory: on the disk that is measured.
    """
    usage = psutil.disk_usage(str(directory))
    mounts = [
        part
        for part in psutil.disk_partitions(all=True)
        if directory.resolve().is_relative_to(part.mountpoint)
    ]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return {
        "cores": cores(),
        "memory": format_size(psutil.virtual_memory().total),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "disk": f"{mount.fstype if mount else 'unknown'}, {format_size(usage.free)} free",
        "load": f"{os.getloadavg()[0]:.2f} before the first line",
    }


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions of packages; None of those that are not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def commit(directory: Path) -> str | None:
    """Of a checkout, if it is one."""
    asked = ["git", "-C", str(directory), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def tidy_up_when_ended() -> None:
    """Ended by SIGTERM, `with` blocks still remove disks, groups and processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fix_allocator() -> None:
    """Make large memory that is freed go back to the system, so that a peak of memory tells.

    The environment says so as well, as an engine changes what nobody has chosen there.
    """
    os.environ.update(ALLOCATOR)
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def allocator() -> str:
    """What `fix_allocator` does, for a table."""
    return f"glibc with a fixed mmap threshold of {_MMAP_THRESHOLD // KiB} KiB"


def status_bytes(field: str) -> int:
    """A figure of this process's memory as the kernel counts it.

    Args:
        field: of /proc/self/status: VmRSS, VmHWM, RssAnon, RssFile, ...
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KiB
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """VmHWM, the high-water mark of resident memory, begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def say(text: str) -> None:
    """Tell what is going on, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def device_rates(kind: str, directory: Path, *, quick: bool) -> dict[str, Any]:
    """What a device's link and its products give, and a disk; bytes and operations per second.

    Args:
        kind: type of the device.
        directory: on the disk.
        quick: small copies and products.
    """
    from benchmarks.parameters.running import bandwidth

    nbytes, size = (16 * MiB, 256) if quick else (256 * MiB, 8192)
    there = torch.empty(nbytes, dtype=torch.uint8, device=kind)
    found: dict[str, Any] = {"copied_bytes": nbytes, "operations": {}}
    for pinned in (True, False):
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).fill_(1)
        memory = "" if pinned else "_pageable"
        for way, into, source in (("to_device", there, here), ("to_host", here, there)):
            copy = partial(into.copy_, source, non_blocking=True)
            found[way + memory] = nbytes / _device_seconds(copy)
    for dtype in (torch.bfloat16, torch.float32):
        one = torch.randn(size, size, device=kind).to(dtype)
        seconds = _device_seconds(partial(torch.matmul, one, one))
        found["operations"][str(dtype).removeprefix("torch.")] = 2.0 * size**3 / seconds
    return found | bandwidth(directory)._asdict()


def _device_seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The least of a few times."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
