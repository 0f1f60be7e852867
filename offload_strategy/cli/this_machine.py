"""This machine for `ssd-offload plan MODEL` and `init`: its GPU, its drives and their rates."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, default_directory
from offload_strategy.config.directories import DIRECTORY_VARIABLE, file_system_of
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth import history
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.regions.region import Region
from offload_strategy.planner.hardware import Device, Drive, device, device_called
from offload_strategy.telemetry import Direction
from offload_strategy.units import GiB

#: Disks with less free space are not proposed.
_LEAST_FREE_BYTES = 10 * GiB
#: Seconds in each direction for a path of which nothing is known.
_QUICK_SECONDS = 0.15


def usual_directories() -> list[Path]:
    """Return the configured directories, or else one on each local disk that can be written to."""
    if os.environ.get(CONFIG_VARIABLE) or os.environ.get(DIRECTORY_VARIABLE):
        return [path for tier in OffloadConfig.load(None).tiers for path in tier.paths]
    measured = [
        Path(of.path) for of, _ in history.load_all_rates() if of.machine == platform.node()
    ]
    mounts = [Path(mount.mountpoint) for mount in psutil.disk_partitions()]
    found: dict[int, Path] = {}
    for path in (default_directory(), *measured, *mounts):
        with contextlib.suppress(OSError):
            disk = path.stat().st_dev
            if disk not in found and (not found or _is_suitable(path)):
                found[disk] = path
    return list(found.values())


def _is_suitable(path: Path) -> bool:
    system = file_system_of(path)
    if system is None or system.is_memory or system.is_network or system.rotational:
        return False
    free_bytes = psutil.disk_usage(str(path)).free
    return path.is_dir() and os.access(path, os.W_OK) and free_bytes >= _LEAST_FREE_BYTES


def known_path(directory: str | Path, seconds: float = _QUICK_SECONDS) -> Drive:
    """Return what is remembered of a path, or measure it for so many seconds in each direction.

    The capacity is what is free. Raises an OffloadError if it cannot be used.
    """
    path, io = Path(os.path.abspath(directory)), OffloadConfig.load(None).io
    with (
        contextlib.closing(Region(path, "measured")) as region,
        contextlib.closing(
            create_backend(io.backend, threads=io.threads_to_use(), block_size=io.block_size)
        ) as backend,
    ):
        of = history.PathIdentity.of(path, region.fd, processes=1, backend=backend)
        rates, source = history.load_rates(of), "remembered"
        if len(rates) < len(Direction):
            rates, source = {**probe(region, backend, seconds=seconds), **rates}, "measured"
            history.save_rates(of, rates)  # for the next answer, and for a run
        read, write = (rates[way].rate for way in (Direction.READ, Direction.WRITE))
        return Drive(str(path), read, write, region.free_bytes, sources={"read_GBps": source})


def as_drives(known: Sequence[Drive]) -> Drive:
    """Return paths as one drive: bytes are striped over them in proportion to their rates."""
    names = ("read", "write", "capacity_bytes")
    figures = {name: sum(getattr(one, name) for one in known) for name in names}
    source = ", ".join(f"{one.sources['read_GBps']} on {one.name}" for one in known)
    return Drive(f"{len(known)} x path", **figures, sources={"read_GBps": source})


def this_gpu() -> Device | None:
    """Return the GPU as the hardware table has it, or raise a ConfigError; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    seen = torch.cuda.get_device_properties(0)
    # The look-up of a name that is not known says which ones are.
    known = device_called(seen.name) or device(seen.name)
    return replace(known, memory_bytes=seen.total_memory)
