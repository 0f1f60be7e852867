"""Whether the capacities that a config names fit into the disks that they lie on, all together."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload_strategy.errors import ConfigError
from offload_strategy.io.regions.region import RESERVE_BYTES
from offload_strategy.units import format_size


def check_capacities(tiers: Sequence[tuple[str, Path, int | None]]) -> None:
    """Check the sums: of all tiers on one file system, and of all processes of this machine.

    Each tier alone is checked when its space is opened. Several may lie on one file system, and
    every process that a launcher started here (``LOCAL_WORLD_SIZE``) has its own files.

    Args:
        tiers: for each path of an ssd tier, the tier's name, the path, and the bytes that it may
            take there, or None for what is left.

    Raises:
        ConfigError: together they ask for more than the file system has, or two tiers name the
            same block device.
    """
    on: dict[int, list[tuple[str, Path, int | None]]] = {}
    devices: dict[int, str] = {}
    for name, path, capacity in tiers:
        try:
            status = path.stat()
        except OSError:
            continue  # opening its space says more
        if stat.S_ISBLK(status.st_mode):
            if status.st_rdev in devices:
                raise ConfigError(
                    f"tiers {devices[status.st_rdev]!r} and {name!r} (tiers[].path) are the same "
                    f"block device ({path.resolve()}), which can hold only one. Name a device for "
                    f"each."
                )
            devices[status.st_rdev] = name
        else:
            on.setdefault(status.st_dev, []).append((name, path, capacity))
    for number, here in on.items():
        _check_file_system(number, here)


def _check_file_system(number: int, here: list[tuple[str, Path, int | None]]) -> None:
    asked = [
        (name, capacity, 1 + sum(device == number for device in _paths_of_others(path)))
        for name, path, capacity in here
        if capacity is not None
    ]
    processes = max((count for _, _, count in asked), default=1)
    if len(asked) < 2 and processes == 1:
        return  # opening its space says more
    wanted = sum(capacity * count for _, capacity, count in asked)
    place = here[0][1]
    free = shutil.disk_usage(place).free
    usable = max(0, free - RESERVE_BYTES)
    if wanted <= usable:
        return
    parts = " + ".join(
        f"{name!r} {format_size(capacity)}" + (f" × {count} processes" if count > 1 else "")
        for name, capacity, count in asked
    )
    share = usable // processes
    advice = f"lower them to {format_size(share)} together"
    if processes > 1:
        advice += (
            f" for each of the {processes} processes (LOCAL_WORLD_SIZE), or give each process a "
            f"disk of its own with $LOCAL_RANK in the path"
        )
    raise ConfigError(
        f"tiers[].capacity: {parts} = {format_size(wanted)}, but the file system of {place} has "
        f"only {format_size(usable)} to give ({format_size(free)} free, less "
        f"{format_size(RESERVE_BYTES)} kept back). Free some space, {advice}, or name a directory "
        f"on another disk for one of them."
    )


def _paths_of_others(path: Path) -> Iterator[int]:
    """The file systems on which the other processes of this machine have their copy of a tier.

    The path of each follows from ours if $LOCAL_RANK is part of it: our number, where it appears,
    becomes theirs. A path without our number is everybody's.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    try:
        size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own = int(rank or "0")
    except ValueError:
        return
    ours, text = path.stat().st_dev, str(path)
    found = [match.span() for match in re.finditer(rf"(?<!\d){own}(?!\d)", text)]
    for other in range(size):
        if other != own:
            # Any of the numbers may be the rank's, or all of them.
            names = [text[:begin] + str(other) + text[end:] for begin, end in found]
            names.append(re.sub(rf"(?<!\d){own}(?!\d)", str(other), text))
            places = (_device_of(name, ours) for name in names if rank)
            yield next((place for place in places if place != ours), ours)


def _device_of(path: str, otherwise: int) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return otherwise
