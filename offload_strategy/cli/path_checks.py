"""Checks of each path of a tier in `ssd-offload doctor`; nothing remains on the path."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from offload_strategy.cli.machine_checks import Check, ok, problem, warning
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import FileSystem, file_system_of
from offload_strategy.errors import OffloadError
from offload_strategy.io.regions.directory_check import check_capacities
from offload_strategy.io.regions.region import Region
from offload_strategy.units import format_size


def check_path(
    path: Path,
    tier: str,
    *,
    capacity: int | None = None,
    direct: bool | Literal["auto"] = "auto",
    overwrite: bool = False,
) -> list[Check]:
    """Check a directory or raw block device by opening it as a tier of that name does."""
    try:
        with (
            _quiet(),
            contextlib.closing(Region(path, tier, capacity, direct, overwrite=overwrite)) as region,
        ):
            takes_direct, room = region.direct, region.capacity
    except OffloadError as error:
        return [_refused(f"{path}", error)]
    if path.is_block_device():
        checks = [ok(f"{path}: device", "a raw block device that carries no data")]
    else:
        checks = [check_file_system(path, file_system_of(path)), _check_unnamed_files(path)]
    io = ok(f"{path}: direct I/O", "works" if takes_direct else "switched off by io.direct: false")
    if not takes_direct and direct is not False:
        io = warning(
            io.name,
            "is not available: bytes pass through the page cache, which costs memory and CPU",
            "use a directory on a local disk (ext4, xfs), or accept it with io.direct: false",
        )
    return [*checks, io, ok(f"{path}: space", f"{format_size(room)} can be used")]


def check_file_system(path: Path, system: FileSystem | None) -> Check:
    """Check whether the file system is suitable for offloading."""
    name = f"{path}: file system"
    if system is None:
        return ok(name, "unknown: this system does not tell")
    if system.is_memory:
        found = f"{system.kind} lives in main memory: what is written there still takes memory"
        return warning(name, found, "name a directory on a disk")
    if system.is_network:
        return warning(
            name,
            f"{system.kind}, on other machines: its speed depends on the network and on others",
            "prefer a local disk, or add one as a further path; measure both: ssd-offload bench",
        )
    if system.kind == "overlay":
        return warning(
            name,
            "overlay, a container's own layer: slow, and often small",
            "mount a volume of the host's disk into the container and name that",
        )
    if system.rotational:
        return warning(
            name,
            f"{system.kind} on a spinning disk",
            "use an SSD; if it is one after all, ssd-offload bench tells its speed",
        )
    return ok(name, system.kind)


def check_devices(paths: Iterable[Path]) -> list[Check]:
    """Check whether several paths share the bandwidth and the space of one device."""
    groups: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            groups[status.st_rdev if path.is_block_device() else status.st_dev].append(path)
    return [
        warning(
            "paths",
            f"{', '.join(map(str, group))} lie on one file system: together they are no faster "
            f"than one, and share its free space",
            "name one path for each device",
        )
        for group in groups.values()
        if len(group) > 1
    ]


def check_together(config: OffloadConfig) -> list[Check]:
    """Check whether the capacities of all tiers fit on their disks, for all local processes."""
    try:
        check_capacities(
            [
                (tier.name, path, tier.capacity if len(tier.paths) == 1 else None)
                for tier in config.tiers
                for path in tier.paths
            ]
        )
    except OffloadError as error:
        return [_refused("capacities", error)]
    return []  # each path has said how much room it has


def _refused(name: str, error: OffloadError) -> Check:
    """Return a problem from an error: its first sentence says what, the others what to do."""
    found, *advice = re.split(r"\. (?=[A-Z])", str(error), maxsplit=1)
    return problem(name, found, advice[0] if advice else "name another path")


def _check_unnamed_files(path: Path) -> Check:
    name = f"{path}: unnamed files"
    flag = getattr(os, "O_TMPFILE", 0)
    why = "this system has none"
    if flag:
        try:
            os.close(os.open(path, os.O_RDWR | flag | os.O_EXCL, 0o600))
            return ok(name, "O_TMPFILE works: no file ever has a name")
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                return problem(name, f"a file cannot be made: {error.strerror}", "check the mount")
            why = "the file system does not offer O_TMPFILE"
    return ok(name, f"{why}: a file is made and loses its name at once")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log lines of a region, because the checks report the same."""
    logger = logging.getLogger("offload_strategy.io")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
