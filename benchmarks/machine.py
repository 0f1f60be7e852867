"""What the figures of a benchmark depend on, and how benchmarks tell what they are doing."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from offload_strategy.units import format_size


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


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def say(text: str) -> None:
    """Tell what is going on, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
