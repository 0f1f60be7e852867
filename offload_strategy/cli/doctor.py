"""`ssd-offload doctor`: checks whether training would work here, and what could be better."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import platform
import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from offload_strategy.cli import machine_checks
from offload_strategy.cli.machine_checks import OK, PROBLEM, WARNING, Check
from offload_strategy.cli.options import Command, Option
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import FileSystem, file_system_of
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.host_memory.memory_limits import memory_cgroup_limit
from offload_strategy.io.backends.protocol import available_backends
from offload_strategy.io.regions.directory_check import check_capacities
from offload_strategy.io.regions.region import Region
from offload_strategy.units import format_size

_ABOUT = (
    "Check whether training with offload works here, and what to do if not. Exit status 1 if it "
    "would not."
)
_PATHS = "a directory or raw block device (default: the paths of the configured tiers)"
_OPTIONS: list[Option] = [
    ("paths", _PATHS, {"nargs": "*", "metavar": "PATH"}),
    ("--json", "print the report as JSON"),
]


def _doctor(options: argparse.Namespace) -> int:
    report = list(examine(options.paths))
    failed = any(check.status == PROBLEM for check in report)
    if options.json:
        checks = [asdict(check) for check in report]
        print(json.dumps({"works": not failed, "checks": checks}, indent=2))
    else:
        _print(report)
    return 1 if failed else 0


def examine(paths: Sequence[str] = ()) -> Iterator[Check]:
    """Check this machine, and these paths or those of the configured tiers."""
    yield Check("python", OK, f"{platform.python_version()} on {platform.system()}")
    yield machine_checks.check_torch()
    try:
        config = OffloadConfig.load(None)
    except ConfigError as error:
        yield Check("config", PROBLEM, str(error), "correct it, or unset SSD_OFFLOAD_CONFIG")
        config = OffloadConfig()
    else:
        yield Check("config", OK, f"tiers: {', '.join(tier.name for tier in config.tiers)}")
    for name, checks in {
        "storage": _backends(config),
        "memory": _memory(config),
        "paths": _paths(config, paths),
    }.items():
        try:
            yield from checks
        except Exception as error:  # goes on with the others
            found = f"could not be looked at: {type(error).__name__}: {error}"
            yield Check(name, WARNING, found, "please report this with the whole output")


def _backends(config: OffloadConfig) -> Iterator[Check]:
    # Here, so that one that fails does not end the other checks.
    yield from machine_checks.check_backends(config.io.backend, available_backends())


def _memory(config: OffloadConfig) -> Iterator[Check]:
    yield machine_checks.check_gpu()
    yield machine_checks.check_cufile(torch.cuda.is_available())
    processes = machine_checks.local_processes()
    each = "; each has buffers and spaces of its own" if processes > 1 else ""
    yield Check("processes", OK, f"{processes} on this machine{each}")
    memory = psutil.virtual_memory()
    yield machine_checks.check_memory(
        config,
        processes=processes,
        total=memory.total,
        available=memory.available,
        limit=memory_cgroup_limit(),
    )
    yield machine_checks.check_huge_pages()
    yield machine_checks.check_locked_memory(
        machine_checks.resource_limit("RLIMIT_MEMLOCK"),
        config.memory.pinned_bytes(memory.available // processes),
        torch.accelerator.is_available(),
    )
    yield machine_checks.check_open_files(machine_checks.resource_limit("RLIMIT_NOFILE"))


def _paths(config: OffloadConfig, named: Sequence[str]) -> Iterator[Check]:
    direct, paths = config.io.direct, [Path(path) for path in named]
    for path in paths:
        yield from check_path(path, "doctor", direct=direct)
    for tier in config.tiers if not named else ():
        # The capacity is that of all paths together: the share of each is measured later.
        alone = tier.capacity if len(tier.paths) == 1 else None
        more: dict[str, Any] = {"direct": direct, "overwrite": tier.overwrite}
        for path in tier.paths:
            paths.append(path)
            yield from check_path(path, tier.name, capacity=alone, **more)
    if not named:
        yield from check_together(config)
    yield from check_devices(paths)


def _print(report: Sequence[Check]) -> None:
    width = max(40, shutil.get_terminal_size((100, 24)).columns)
    indent = " " * 9
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    for check in report:
        print(wrapper.fill(f"{check.status:<9}{check.name}: {check.found}"))
        if check.advice:
            print(f"{indent}-> {check.advice}")  # on one line: there are commands to be copied
    problems = sum(check.status == PROBLEM for check in report)
    warnings = sum(check.status == WARNING for check in report)
    if problems:
        some = f"{problems} problem{'s' * (problems > 1)}"
        print(f"\nTraining would not work here: {some} to solve.")
    else:
        some = f"; {warnings} warning{'s' * (warnings > 1)} to look at" if warnings else ""
        print(f"\nTraining works here{some}.")


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
        checks = [Check(f"{path}: device", OK, "a raw block device that carries no data")]
    else:
        checks = [check_file_system(path, file_system_of(path)), _check_unnamed_files(path)]
    works = "works" if takes_direct else "switched off by io.direct: false"
    io = Check(f"{path}: direct I/O", OK, works)
    if not takes_direct and direct is not False:
        found = "is not available: bytes pass through the page cache, which costs memory and CPU"
        advice = "use a directory on a local disk (ext4, xfs), or accept it with io.direct: false"
        io = Check(io.name, WARNING, found, advice)
    return [*checks, io, Check(f"{path}: space", OK, f"{format_size(room)} can be used")]


def check_file_system(path: Path, system: FileSystem | None) -> Check:
    """Check whether the file system is suitable for offloading."""
    name = f"{path}: file system"
    if system is None:
        return Check(name, OK, "unknown: this system does not tell")
    for unsuitable, found, advice in (
        (
            system.is_memory,
            "in main memory: what is written there still takes memory",
            "name a directory on a disk",
        ),
        (
            system.is_network,
            "on other machines: its speed depends on the network and on others",
            "prefer a local disk, or add one as a further path; measure both: ssd-offload bench",
        ),
        (
            system.kind == "overlay",
            "a container's own layer: slow, and often small",
            "mount a volume of the host's disk into the container and name that",
        ),
        (
            system.rotational,
            "on a spinning disk",
            "use an SSD; if it is one after all, ssd-offload bench tells its speed",
        ),
    ):
        if unsuitable:
            return Check(name, WARNING, f"{system.kind}, {found}", advice)
    return Check(name, OK, system.kind)


def check_devices(paths: Iterable[Path]) -> list[Check]:
    """Check whether several paths share the bandwidth and the space of one device."""
    groups: dict[int, list[Path]] = defaultdict(list)
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            groups[status.st_rdev if path.is_block_device() else status.st_dev].append(path)
    return [
        Check(
            "paths",
            WARNING,
            f"{', '.join(map(str, group))} lie on one file system: together they are no faster "
            "than one, and share its free space",
            "name one path for each device",
        )
        for group in groups.values()
        if len(group) > 1
    ]


def check_together(config: OffloadConfig) -> list[Check]:
    """Check whether the capacities of all tiers fit on their disks, for all local processes."""
    capacities = [
        (tier.name, path, tier.capacity if len(tier.paths) == 1 else None)
        for tier in config.tiers
        for path in tier.paths
    ]
    try:
        check_capacities(capacities)
    except OffloadError as error:
        return [_refused("capacities", error)]
    return []  # each path has said how much room it has


def _refused(name: str, error: OffloadError) -> Check:
    """Return a problem from an error: its first sentence says what, the others what to do."""
    found, *advice = re.split(r"\. (?=[A-Z])", str(error), maxsplit=1)
    return Check(name, PROBLEM, found, advice[0] if advice else "name another path")


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


COMMAND = Command("doctor", _doctor, "check this machine", _OPTIONS, _ABOUT)
