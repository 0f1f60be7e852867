"""How much main memory there is for this process."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_bytes() -> int:
    """Bytes that could be had now: of the machine's memory, and of what the cgroup allows."""
    available = int(psutil.virtual_memory().available)
    limit = memory_cgroup_limit()
    if limit is None:
        return available
    return max(0, min(available, limit - int(psutil.Process().memory_info().rss)))


def memory_cgroup_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this process's memory cgroups allow: the least on the way up, None if unlimited.

    Args:
        root: where /proc and /sys are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path is the host's, and what is mounted is the container's own group.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            try:
                text = (place / file).read_text().strip()
            except OSError:
                continue
            if text.isdecimal() and int(text) < 1 << 60:  # version 1 says "no limit" as 2^63
                limits.append(int(text))
    return min(limits, default=None)
