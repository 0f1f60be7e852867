"""`ssd-offload plan --search --device cpu`: a machine without a GPU, given or measured."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from offload_strategy.cli.cpu_measurement import measured_cores, measured_path, path_of
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.planner.hardware import Drives, drive_set
from offload_strategy.planner.search.cpu_request import CpuRequest
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import parse_size

#: Value of `--device` for a machine without a GPU.
CPU = "cpu"
_GIGA = 1e9
_TERA = 1e12


def cpu_request(options: argparse.Namespace, shape: TransformerShape) -> CpuRequest:
    """Return the run, with measured figures of this machine for options that are not given.

    The cores are measured, except for `--tflops` and `--update-rate`, and so are the paths of
    `--dir`, unless there is `--ssd`, or `--read` and `--write`.

    Args:
        options: Options of the command line.
        shape: Shape of the model.

    Raises:
        ConfigError: If an option is missing or wrong.
        OffloadError: If a path cannot be measured.
    """
    flops = None if options.tflops is None else options.tflops * _TERA
    for name, value in (("--tflops", flops), ("--update-rate", options.update_rate)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: give a number above 0")
    memory = _memory(options.host_memory)
    drives = _drives(options)
    longest = max(options.sequences or [options.sequence])
    cores = measured_cores(shape, longest, flops=flops, update_rate=options.update_rate)
    return CpuRequest(shape, cores, drives, memory, options.duplex)


def _memory(text: str | None) -> int:
    if text is None:
        return available_bytes()
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--host-memory: {error}") from error


def _drives(options: argparse.Namespace) -> Drives:
    rates = (options.read, options.write)
    if (options.read is None) != (options.write is None):
        raise ConfigError("give both of --read and --write, or none of them")
    if options.ssd is not None:
        if options.read is not None:
            raise ConfigError("give --ssd, or --read and --write, which say how fast it is")
        return drive_set(options.ssd)
    directories = [Path(one) for one in options.dir or (default_directory(),)]
    if options.read is None:
        found = [measured_path(directory).drive for directory in directories]
        # Bytes are striped over several paths in proportion to their rates.
        return path_of(
            sum(drive.read for drive in found),
            sum(drive.write for drive in found),
            sum(drive.capacity_bytes for drive in found),
            f"measured on {', '.join(map(str, directories))}",
        )
    for name, rate in zip(("--read", "--write"), rates, strict=True):
        if not rate > 0:
            raise ConfigError(f"{name} is {rate}; give more than 0 GB/s")
    free = sum(_free_bytes(directory) for directory in directories)
    return path_of(options.read * _GIGA, options.write * _GIGA, free, "given")


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(f"--dir: {directory}: {error.strerror or error}") from error
