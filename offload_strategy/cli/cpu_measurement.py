"""Measurement of the cores and the paths of this machine for a search, in a few seconds.

[Note: one layer at two batches]
A layer of the model's kind, of its width or of 768, computes forward and backward for one sequence
and for four. The time of the three additional sequences is that of FLOP; the rest of the first's is
proportional to the parameters: weights are read from memory, gradients are written. The fastest of
a few runs counts, because other load only makes it slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from torch import nn

from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.regions.region import Region
from offload_strategy.planner.hardware import Drive, Drives
from offload_strategy.planner.search.cpu_request import Cores
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


def measured_cores(
    shape: TransformerShape,
    sequence: int,
    *,
    flops: float | None = None,
    update_rate: float | None = None,
) -> Cores:
    """Measure this machine's cores, as many as torch uses.

    Args:
        shape: Shape of the model.
        sequence: Tokens of a sequence.
        flops: FLOP/s of a layer, instead of a measurement.
        update_rate: Parameters that are updated in a second, instead of a measurement.
    """
    source = f"measured, {torch.get_num_threads()} threads"
    sources = dict.fromkeys(("flops", "update_rate", "copy_rate", "process_bytes"), source)
    pass_seconds = 0.0
    if flops is None:
        flops, pass_seconds = _layer(shape, min(sequence, _LONGEST))
    else:
        sources["flops"] = "given"
    measured_rate = _updates()
    if update_rate is None:
        update_rate = measured_rate
    else:
        sources["update_rate"] = "given"
    copy_rate = _copies()
    return Cores(
        flops=flops,
        update_rate=update_rate,
        copy_rate=copy_rate,
        process_bytes=_resident_bytes() + _MORE_BYTES,
        pass_seconds=pass_seconds,
        sources=sources,
    )


def measured_path(directory: Path) -> Drives:
    """Measure the rates and the free space of a path.

    Raises:
        OffloadError: If it cannot be used.
    """
    with contextlib.closing(Region(directory, "search")) as region:
        backend = create_backend("posix", threads=2, block_size=32 * MiB)
        try:
            found = probe(region, backend, seconds=_PROBE_SECONDS)
        finally:
            backend.close()
        read, write = found[Direction.READ].rate, found[Direction.WRITE].rate
        return path_of(read, write, region.free_bytes, f"measured on {directory}")


def path_of(read: float, write: float, capacity: int, source: str) -> Drives:
    """Return a drive of which only rates are known.

    Args:
        read: Read rate in bytes per second.
        write: Write rate in bytes per second.
        capacity: Capacity in bytes.
        source: Where the rates are from.
    """
    return Drives(Drive("path", read, write, capacity, None, None, {"read_GBps": source}), 1)


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
