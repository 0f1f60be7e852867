"""`ssd-offload doctor`: checks whether training would work here, and what could be better."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from offload_strategy.cli import machine_checks, path_checks
from offload_strategy.cli.machine_checks import OK, PROBLEM, WARNING, Check
from offload_strategy.cli.options import Command, Option
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import local_processes
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import memory_cgroup_limit
from offload_strategy.io.backends.protocol import available_backends

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
        config = OffloadConfig.load(None)
    except ConfigError as error:
        yield Check("config", PROBLEM, str(error), "correct it, or unset SSD_OFFLOAD_CONFIG")
        config = OffloadConfig()
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
    yield machine_checks.check_locked_memory(
        machine_checks.resource_limit("RLIMIT_MEMLOCK"),
        config.memory.pinned_bytes(memory.available // processes),
        torch.accelerator.is_available(),
    )
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
        yield from path_checks.check_path(path, tier, capacity, config.io.direct, overwrite)
    if not named:
        yield from path_checks.check_together([place[:3] for place in places])
    yield from path_checks.check_devices(path for _, path, *_ in places)


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
