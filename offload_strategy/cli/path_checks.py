"""Checks of each path of a tier in `ssd-offload doctor`; nothing remains on the path."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from offload_strategy.cli.machine_checks import OK, PROBLEM, WARNING, Check, refused
from offload_strategy.config.directories import FileSystem, file_system_of
from offload_strategy.errors import OffloadError
from offload_strategy.io.regions.directory_check import check_capacities
from offload_strategy.io.regions.region import Region
from offload_strategy.units import format_size


def check_path(
    path: Path,
    tier: str,
    capacity: int | None = None,
    direct: bool | Literal["auto"] = "auto",
    overwrite: bool = False,
) -> Iterator[Check]:
    """Check a directory or raw block device by opening it as a tier of that name does."""
    logger = logging.getLogger("offload_strategy.io")
    try:
        with contextlib.ExitStack() as stack:
            # A region logs what the checks say.
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
            region = Region(path, tier, capacity, direct, overwrite=overwrite)
            stack.callback(region.close)
            takes_direct, room = region.direct, region.capacity
    except OffloadError as error:
        yield refused(f"{path}", error)
        return
    if path.is_block_device():
        yield Check(f"{path}: device", OK, "a raw block device that carries no data")
    else:
        yield check_file_system(path, file_system_of(path))
        yield _check_unnamed_files(path)
    name = f"{path}: direct I/O"
    if takes_direct or direct is False:
        yield Check(name, OK, "works" if takes_direct else "switched off by io.direct: false")
    else:
        found = "is not available: bytes pass through the page cache, which costs memory and CPU"
        advice = "use a directory on a local disk (ext4, xfs), or accept it with io.direct: false"
        yield Check(name, WARNING, found, advice)
    yield Check(f"{path}: space", OK, f"{format_size(room)} can be used")


def check_file_system(path: Path, system: FileSystem | None) -> Check:
    """Check whether the file system is suitable for offloading."""
    name = f"{path}: file system"
    if system is None:
        return Check(name, OK, "unknown: this system does not tell")
    if system.is_memory:
        found = "in main memory: what is written there still takes memory"
        advice = "name a directory on a disk"
    elif system.is_network:
        found = "on other machines: its speed depends on the network and on others"
        advice = (
            "prefer a local disk, or add one as a further path; measure both: ssd-offload bench"
        )
    elif system.kind == "overlay":
        found = "a container's own layer: slow, and often small"
        advice = "mount a volume of the host's disk into the container and name that"
    elif system.rotational:
        found = "on a spinning disk"
        advice = "use an SSD; if it is one after all, ssd-offload bench tells its speed"
    else:
        return Check(name, OK, system.kind)
    return Check(name, WARNING, f"{system.kind}, {found}", advice)


def check_devices(paths: Iterable[Path]) -> Iterator[Check]:
    """Check whether several paths share the bandwidth and the space of one device."""
    groups: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            groups[status.st_rdev if path.is_block_device() else status.st_dev].append(path)
    for group in groups.values():
        if len(group) > 1:
            found = (
                f"{', '.join(map(str, group))} lie on one file system: together they are no "
                "faster than one, and share its free space"
            )
            yield Check("paths", WARNING, found, "name one path for each device")


def check_together(capacities: Sequence[tuple[str, Path, int | None]]) -> Iterator[Check]:
    """Check whether what tiers may take of their paths fits there, for all local processes."""
    try:
        check_capacities(capacities)  # each path has said how much room it has
    except OffloadError as error:
        yield refused("capacities", error)


def _check_unnamed_files(path: Path) -> Check:
    name = f"{path}: unnamed files"
    flag = getattr(os, "O_TMPFILE", 0)
    why = "this system has none"
    if flag:
        try:
            os.close(os.open(path, os.O_RDWR | flag | os.O_EXCL, 0o600))
            return Check(name, OK, "O_TMPFILE works: no file ever has a name")
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                found = f"a file cannot be made: {error.strerror}"
                return Check(name, PROBLEM, found, "check the mount")
            why = "the file system does not offer O_TMPFILE"
    return Check(name, OK, f"{why}: a file is made and loses its name at once")
