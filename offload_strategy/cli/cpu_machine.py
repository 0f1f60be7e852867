"""`ssd-offload plan --search --device cpu`: this machine as given, or as measured in seconds.

[Note: one layer at two batches]
A layer of the model's kind, of its width or of 768, computes forward and backward for one sequence
and for four. The time of the three additional sequences is that of FLOP; the rest of the first's is
proportional to the parameters: weights are read from memory, gradients are written. The fastest of
a few runs counts, because other load only makes it slower.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import nn

from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.regions.region import Region
from offload_strategy.planner.hardware import Drive, Drives, drive_set
from offload_strategy.planner.search.cpu_request import Cores, CpuRequest
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.telemetry import Direction
from offload_strategy.units import MiB

#: Wider products are no faster, longer sequences need no less memory.
_WIDEST, _LONGEST = 768, 256
_SEQUENCES = 4
#: Size of what is updated and copied: more than caches hold.
_PARAMETERS = 1 << 23
_RUNS = 3
#: Stacks of I/O threads, and further libraries.
_MORE_BYTES = 32 * MiB
_PROBE_SECONDS = 0.5
_GIGA = 1e9


def cpu_request(options: argparse.Namespace, shape: TransformerShape) -> CpuRequest:
    """Return the run, with measured figures of this machine for options that are not given.

    The cores are measured, except for `--tflops` and `--update-rate`, and so are the paths of
    `--dir`, unless there is `--ssd`, or `--read` and `--write`. Raises a ConfigError if an option
    is missing or wrong, and an OffloadError if a path cannot be measured.
    """
    memory = available_bytes() if options.host_memory is None else options.host_memory
    drives = _drives(options)
    longest = max(options.sequences or [options.sequence])
    cores = measured_cores(shape, longest, flops=options.flops, update_rate=options.update_rate)
    return CpuRequest(shape, cores, drives, memory, options.duplex)


def _drives(options: argparse.Namespace) -> Drives:
    """Return drives of the table, or all paths as one drive, with the rates given or measured."""
    if (options.read is None) != (options.write is None):
        raise ConfigError("give both of --read and --write, or none of them")
    if options.ssd is not None:
        if options.read is not None:
            raise ConfigError("give --ssd, or --read and --write, which say how fast it is")
        return drive_set(options.ssd)
    directories = [Path(one) for one in options.dir or (default_directory(),)]
    if options.read is None:
        # Bytes are striped over several paths in proportion to their rates.
        measured = zip(*map(_measured_path, directories), strict=True)
        read, write, free = (sum(figures) for figures in measured)
        source = f"measured on {', '.join(map(str, directories))}"
    else:
        read, write, source = options.read * _GIGA, options.write * _GIGA, "given"
        free = sum(map(_free_bytes, directories))
    return Drives(Drive("path", read, write, int(free), sources={"read_GBps": source}), 1)


def _free_bytes(directory: Path) -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise ConfigError(f"--dir: {directory}: {error.strerror or error}") from error


def _measured_path(directory: Path) -> tuple[float, float, int]:
    """Measure the read and write rate of a path, and its free bytes."""
    with contextlib.closing(Region(directory, "search")) as region:
        backend = create_backend("posix", threads=2, block_size=32 * MiB)
        with contextlib.closing(backend):
            found = probe(region, backend, seconds=_PROBE_SECONDS)
        return found[Direction.READ].rate, found[Direction.WRITE].rate, region.free_bytes


def measured_cores(
    shape: TransformerShape,
    sequence: int,
    *,
    flops: float | None = None,
    update_rate: float | None = None,
) -> Cores:
    """Measure this machine's cores, as many as torch uses, except for figures that are given."""
    source = f"measured, {torch.get_num_threads()} threads"
    given = {"flops": flops, "update_rate": update_rate, "copy_rate": None, "process_bytes": None}
    pass_seconds = 0.0
    if flops is None:
        flops, pass_seconds = _layer(shape, min(sequence, _LONGEST))
    # Measured even if it is given: the process takes more memory after it has trained a little.
    measured_rate = _updates()
    copy_rate = _copies()
    return Cores(
        flops=flops,
        update_rate=update_rate or measured_rate,
        copy_rate=copy_rate,
        process_bytes=_resident_bytes() + _MORE_BYTES,
        pass_seconds=pass_seconds,
        sources={name: "given" if value else source for name, value in given.items()},
    )


def _layer(shape: TransformerShape, sequence: int) -> tuple[float, float]:
    """Return FLOP/s, and seconds per parameter of a pass; see [Note: one layer at two batches]."""
    size = shape.attention_width // shape.heads
    width = min(_WIDEST, shape.hidden) // size * size or size
    feed_forward = max(1, width * shape.inner // shape.hidden)
    layer = nn.TransformerEncoderLayer(
        width, width // size, feed_forward, dropout=0.0, activation="gelu",
        batch_first=True, norm_first=True,
    )  # fmt: skip
    seen = replace(
        shape, kind="gpt", layers=1, hidden=width, heads=width // size, kv_heads=None,
        feed_forward=feed_forward, gated=False, head_size=None, decoder_layers=0,
    )  # fmt: skip

    def passes(batch: int) -> Callable[[], None]:
        inputs = torch.randn(batch, sequence, width, requires_grad=True)

        def run() -> None:
            layer(inputs).sum().backward()
            layer.zero_grad(set_to_none=True)
            inputs.grad = None

        return run

    one, several = _fastest(passes(1)), _fastest(passes(_SEQUENCES))
    each = max((several - one) / (_SEQUENCES - 1), several / _SEQUENCES / 2)
    beside = max(0.0, one - each)
    # Backward takes twice as long as forward.
    return 3 * seen.layer_flops(1, sequence) / each, beside / seen.layer_parameters


def _updates() -> float:
    """Measure the parameters that a fused AdamW updates in a second."""
    weight = nn.Parameter(torch.zeros(_PARAMETERS))
    weight.grad = torch.ones(_PARAMETERS)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _PARAMETERS / _fastest(optimizer.step)


def _copies() -> float:
    """Measure the bytes that are copied in a second."""
    source, target = torch.ones(_PARAMETERS), torch.ones(_PARAMETERS)
    return source.nbytes / _fastest(lambda: target.copy_(source))


def _fastest(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _resident_bytes() -> int:
    """Return the memory of this process, which has trained a little, without free memory."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
