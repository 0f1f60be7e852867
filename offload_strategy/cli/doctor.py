"""`ssd-offload doctor`: checks whether training would work here, and what could be better.

`machine_checks` has the checks of the machine. Those of paths are here; nothing remains on a path.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import psutil
import torch

from offload_strategy.cli import machine_checks
from offload_strategy.cli.machine_checks import OK, PROBLEM, WARNING, Check, refused
from offload_strategy.cli.options import Command, Option
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import FileSystem, file_system_of, local_processes
from offload_strategy.engine.resources import with_default_tiers
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
    yield Check("torch", OK, str(torch.__version__))
    try:
        config = with_default_tiers(OffloadConfig.load(None))
    except ConfigError as error:
        yield Check("config", PROBLEM, str(error), "correct it, or unset SSD_OFFLOAD_CONFIG")
        config = with_default_tiers(OffloadConfig())
    else:
        yield Check("config", OK, f"tiers: {', '.join(tier.name for tier in config.tiers)}")
    for name, checks in {
        "storage": _storage(config),
        "memory": _memory(config),
        "paths": _paths(config, paths),
    }.items():
        try:
            yield from checks
        except Exception as error:  # goes on with the others
            found = f"could not be looked at: {type(error).__name__}: {error}"
            yield Check(name, WARNING, found, "please report this with the whole output")


def _storage(config: OffloadConfig) -> Iterator[Check]:
    # Here, so that one that fails does not end the other checks.
    yield from machine_checks.check_backends(config.io.backend, available_backends())
    yield machine_checks.check_encryption(config.io.encryption)


def _memory(config: OffloadConfig) -> Iterator[Check]:
    yield machine_checks.check_gpu()
    yield machine_checks.check_cufile(torch.cuda.is_available())
    processes = local_processes()
    each = "; each has buffers and spaces of its own" if processes > 1 else ""
    yield Check("processes", OK, f"{processes} on this machine{each}")
    memory, limit = psutil.virtual_memory(), memory_cgroup_limit()
    yield machine_checks.check_memory(
        config, processes=processes, total=memory.total, available=memory.available, limit=limit
    )
    yield machine_checks.check_huge_pages()
    locked = machine_checks.resource_limit("RLIMIT_MEMLOCK")
    pinned = config.memory.pinned_bytes(memory.available // processes)
    yield machine_checks.check_locked_memory(locked, pinned, torch.accelerator.is_available())
    yield machine_checks.check_open_files(machine_checks.resource_limit("RLIMIT_NOFILE"))


def _paths(config: OffloadConfig, named: Sequence[str]) -> Iterator[Check]:
    # The capacity is that of all paths of a tier together: the share of each is measured later.
    places = [
        (tier.name, path, tier.capacity if len(tier.paths) == 1 else None, tier.overwrite)
        for tier in config.tiers
        for path in tier.paths
    ]
    if named:
        places = [("doctor", Path(path), None, False) for path in named]
    for tier, path, capacity, overwrite in places:
        yield from check_path(path, tier, capacity, config.io.direct, overwrite)
    if not named:
        try:
            check_capacities([place[:3] for place in places])  # of all local processes together
        except OffloadError as error:
            yield refused("capacities", error)
    yield from check_devices(path for _, path, *_ in places)


# ---------------------------------------------------------------------- paths
def check_path(
    path: Path,
    tier: str,
    capacity: int | None = None,
    direct: bool | Literal["auto"] = "auto",
    overwrite: bool = False,
) -> Iterator[Check]:
    """Check a directory or raw block device by opening it as a tier of that name does."""
    logger = logging.getLogger("offload_strategy.io")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a region logs what the checks say
    try:
        region = Region(path, tier, capacity, direct, overwrite=overwrite)
        region.close()
    except OffloadError as error:
        yield refused(f"{path}", error)
        return
    finally:
        logger.setLevel(level)
    if path.is_block_device():
        yield Check(f"{path}: device", OK, "a raw block device that carries no data")
    else:
        yield check_file_system(path, file_system_of(path))
        try:
            os.close(os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_EXCL, 0o600))
            named = "O_TMPFILE works: no file ever has a name"
        except (AttributeError, OSError):  # the region could make one in another way
            named = "there is no O_TMPFILE: a file is made and loses its name at once"
        yield Check(f"{path}: unnamed files", OK, named)
    name = f"{path}: direct I/O"
    if region.direct or direct is False:
        yield Check(name, OK, "works" if region.direct else "switched off by io.direct: false")
    else:
        found = "is not available: bytes pass through the page cache, which costs memory and CPU"
        advice = "use a directory on a local disk (ext4, xfs), or accept it with io.direct: false"
        yield Check(name, WARNING, found, advice)
    yield Check(f"{path}: space", OK, f"{format_size(region.capacity)} can be used")


def check_file_system(path: Path, system: FileSystem) -> Check:
    """Check whether the file system is suitable for offloading."""
    name = f"{path}: file system"
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


# ---------------------------------------------------------------------- the report
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


COMMAND = Command("doctor", _doctor, "check this machine", _OPTIONS, _ABOUT)
