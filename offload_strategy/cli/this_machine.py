"""This machine for `ssd-offload plan MODEL` and `init`: GPU, drives and cores, and their rates.

[Note: one layer at two batches]
A layer of the model's kind, of its width or of 768, computes forward and backward for one sequence
and for four. The time of the three additional sequences is that of FLOP; the rest of the first's is
proportional to the parameters: weights are read from memory, gradients are written. The fastest of
a few runs counts, because other load only makes it slower.
"""

from __future__ import annotations

import contextlib
import os
import platform
import timeit
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from offload_strategy.config import CONFIG_VARIABLE, OffloadConfig, default_directory
from offload_strategy.config.directories import DIRECTORY_VARIABLE, file_system_of
from offload_strategy.host_memory.c_allocator import freed_memory
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth import history
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.regions.region import Region
from offload_strategy.planner.hardware import Device, Drive, device, device_called
from offload_strategy.planner.request import Cores
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.telemetry import Direction
from offload_strategy.units import GiB, MiB

#: Disks with less free space are not proposed.
_LEAST_FREE_BYTES = 10 * GiB
#: Seconds in each direction for a path of which nothing is known: for `init`, and for a plan.
_QUICK_SECONDS, _PROBE_SECONDS = 0.15, 0.5
#: Wider products are no faster, longer sequences need no less memory.
_WIDEST, _LONGEST = 768, 256
_SEQUENCES = 4
_RUNS = 3
#: For an answer at once: width of a layer, tokens of a sequence, and bytes of copies that take as
#: long as an update, which reads and writes a weight and two moments, and reads a gradient.
_QUICK_WIDEST, _QUICK_LENGTH, _COPIED_BYTES = 256, 64, 7 * 4 / 2
#: Size of what is updated and copied: more than caches hold.
_PARAMETERS = 1 << 23
#: Stacks of I/O threads, and further libraries.
_MORE_BYTES = 32 * MiB


def usual_directories() -> list[Path]:
    """Return the configured directories, or else one on each local disk that can be written to."""
    if os.environ.get(CONFIG_VARIABLE) or os.environ.get(DIRECTORY_VARIABLE):
        return [path for tier in OffloadConfig.load(None).tiers for path in tier.paths]
    known, machine = history.load_all_rates(), platform.node()
    measured = [Path(of.path) for of, _ in known if of.machine == machine]
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
    if system.is_memory or system.is_network or system.rotational:
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
        return Drive(str(path), read, write, region.free_bytes, sources={"read": source})


def as_drives(directories: Iterable[str | Path]) -> Drive:
    """Return known paths as one drive: bytes are striped over them in proportion to their rates."""
    known = [known_path(directory, _PROBE_SECONDS) for directory in directories]
    names = ("read", "write", "capacity_bytes")
    figures = {name: sum(getattr(one, name) for one in known) for name in names}
    source = ", ".join(f"{one.sources['read']} on {one.name}" for one in known)
    return Drive(f"{len(known)} x path", **figures, sources={"read": source})


def this_gpu() -> Device | None:
    """Return the GPU as the hardware table has it, or raise a ConfigError; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    seen = torch.cuda.get_device_properties(0)
    # The look-up of a name that is not known says which ones are.
    return replace(device_called(seen.name) or device(seen.name), memory_bytes=seen.total_memory)


# ---------------------------------------------------------------------- cores
def measured_cores(
    shape: TransformerShape,
    sequence: int,
    *,
    flops: float | None = None,
    update_rate: float | None = None,
    quickly: bool = False,
) -> Cores:
    """Measure this machine's cores, as many as torch uses, except for figures that are given.

    `quickly` is for an answer at once: a small layer on one thread, which other load disturbs less,
    and updates as fast as their bytes are copied, because an optimizer takes a second to import.
    """
    threads = torch.get_num_threads()
    source = f"measured, {'1 of ' if quickly else ''}{threads} threads"
    given = {"flops": flops, "update_rate": update_rate, "copy_rate": None, "process_bytes": None}
    pass_seconds = 0.0
    if flops is None:
        used = 1 if quickly else threads
        torch.set_num_threads(used)
        try:
            flops, pass_seconds = _layer(shape, sequence, quickly)
        finally:
            torch.set_num_threads(threads)
        flops, pass_seconds = flops * threads / used, pass_seconds * used / threads
    # Nothing of it may be left when the memory of the process is measured.
    copy_rate = (4 * _PARAMETERS) / _fastest(
        partial(torch.ones(_PARAMETERS).copy_, torch.ones(_PARAMETERS))
    )
    # Measured even if it is given: the process takes more memory after it has trained a little.
    measured_rate = copy_rate / _COPIED_BYTES if quickly else _updates()
    freed_memory.return_all()
    return Cores(
        flops=flops,
        update_rate=update_rate or measured_rate,
        copy_rate=copy_rate,
        process_bytes=psutil.Process().memory_info().rss + _MORE_BYTES,
        pass_seconds=pass_seconds,
        sources={name: "given" if value else source for name, value in given.items()},
    )


def _layer(shape: TransformerShape, sequence: int, quickly: bool) -> tuple[float, float]:
    """Return FLOP/s, and seconds per parameter of a pass; see [Note: one layer at two batches]."""
    size = shape.attention_width // shape.heads
    width = min(_QUICK_WIDEST if quickly else _WIDEST, shape.hidden) // size * size or size
    feed_forward = max(1, width * shape.inner // shape.hidden)
    layer = nn.TransformerEncoderLayer(
        width, width // size, feed_forward, dropout=0.0, activation="gelu",
        batch_first=True, norm_first=True,
    )  # fmt: skip
    seen = TransformerShape("gpt", 1, width, width // size, 1, feed_forward=feed_forward)
    sequence = _QUICK_LENGTH if quickly else min(sequence, _LONGEST)

    def run(inputs: torch.Tensor) -> None:
        layer(inputs).sum().backward()
        layer.zero_grad(set_to_none=True)
        inputs.grad = None

    one, several = (
        _fastest(partial(run, torch.randn(batch, sequence, width, requires_grad=True)))
        for batch in (1, _SEQUENCES)
    )
    each = max((several - one) / (_SEQUENCES - 1), several / _SEQUENCES / 2)
    beside = max(0.0, one - each)
    # Backward takes twice as long as forward.
    return 3 * seen.layer_flops(1, sequence) / each, beside / seen.layer_parameters


def _updates() -> float:
    """Measure the parameters that a fused AdamW updates in a second."""
    weight = nn.Parameter(torch.zeros(_PARAMETERS))
    weight.grad = torch.ones(_PARAMETERS)
    return _PARAMETERS / _fastest(torch.optim.AdamW([weight], fused=True).step)


def _fastest(run: Callable[[], object]) -> float:
    run()
    return min(timeit.repeat(run, "gc.enable()", number=1, repeat=_RUNS))
