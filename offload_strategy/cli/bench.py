"""`ssd-offload bench PATH...`: the bandwidth of paths, and how a tier would stripe over them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload_strategy.cli.options import Command, Option, given, rate
from offload_strategy.config import OffloadConfig
from offload_strategy.config.directories import file_system_of
from offload_strategy.errors import OffloadError
from offload_strategy.io.backends.protocol import Backend, create_backend
from offload_strategy.io.bandwidth.estimator import round_trip_rate
from offload_strategy.io.bandwidth.history import PathIdentity, Rates, load_rates, save_rates
from offload_strategy.io.bandwidth.probe import MAX_BYTES, probe, write_latencies
from offload_strategy.io.regions.region import Region
from offload_strategy.plan_runtime.profile import check_writable, write_text
from offload_strategy.telemetry import Direction, Progress
from offload_strategy.units import MiB, format_size

#: Size of the writes whose latency is measured: that of a small tensor.
_LATENCY_BYTES = 2 * MiB
#: Settings that `--sweep` tries, and the longest time for each.
_SWEEP_BLOCKS = (1 * MiB, 4 * MiB, 16 * MiB, 32 * MiB)
_SWEEP_THREADS = (1, 2, 4, 8)
_SWEEP_SECONDS = 0.25

_DEVICE = "a directory, or a raw block device (what is on it is lost)"
_SIZE = "to use; at most a quarter of what is free (default: 1GiB)"
_SECONDS = {"type": rate(most=3600), "default": 2.0}
_OPTIONS: list[Option] = [
    ("paths", _DEVICE, {"nargs": "+", "metavar": "PATH"}),
    ("--seconds S", "of writing, and of reading (default: 2)", _SECONDS),
    ("--size SIZE", _SIZE, {"default": MAX_BYTES}),
    ("--threads THREADS", "as io.threads of the config"),
    ("--block-size BLOCK_SIZE", "as io.block_size of the config"),
    ("--backend BACKEND", "as io.backend of the config"),
    ("--sweep", "also try other block sizes and numbers of threads"),
    ("--overwrite", "take a block device although data is on it"),
    ("--json FILE", "write figures to a file; '-': print them, not the table", {"type": str}),
]


def _bench(options: argparse.Namespace) -> int:
    names = ("threads", "block_size", "backend")
    configured = OffloadConfig.load(None).io.model_dump(exclude_unset=True)
    io = OffloadConfig(io=configured | given(options, *names)).io
    options.threads, options.block_size = io.threads_to_use(), io.block_size
    options.backend = io.backend
    if options.json not in (None, "-"):
        check_writable(Path(options.json))
    results: list[dict[str, Any]] = []
    parts = 3 if options.sweep else 2
    form = "{desc} |{bar}| {percentage:3.0f}% {elapsed}"
    with Progress("", parts * len(options.paths), delay=0, miniters=0, bar_format=form) as bar:
        for number, path in enumerate(options.paths):
            results.append({"path": path, "error": None})
            try:
                _measure(results[-1], options, bar, parts * number)
            except OffloadError as error:  # the figures of before are worth having
                results[-1]["error"] = str(error)
    # A tier stripes in proportion to the round-trip rate of each path.
    measured = [result for result in results if "direct" in result]
    rates = [round_trip_rate(*_gigabytes(result)) for result in measured]
    for result, its in zip(measured, rates, strict=True):
        result["share"] = its / sum(rates)
    report = {name: getattr(options, name) for name in (*names, "seconds")} | {"paths": results}
    if options.json == "-":
        print(json.dumps(report, indent=2))
    else:
        _print_tables(results, options)
        if options.json is not None:
            write_text(Path(options.json), json.dumps(report, indent=2) + "\n")
    failed = [result for result in results if result["error"] is not None]
    for result in failed:
        print(f"ssd-offload: {result['path']}: {result['error']}", file=sys.stderr)
    return 1 if failed else 0


def _begin(bar: Progress, part: int, description: str) -> Callable[[float], object]:
    """Return a function to call with the share of a part of the work that is done."""
    bar.set_description_str(description)
    return lambda share: bar.update(part + share - bar.n)


def _measure(result: dict[str, Any], options: argparse.Namespace, bar: Progress, part: int) -> None:
    """Add the figures of a path to a result, as the report in JSON has them, phase by phase."""
    path = Path(result["path"])
    is_device = path.is_block_device()
    overwrite = options.overwrite and is_device
    with contextlib.closing(Region(path, path.name or "bench", overwrite=overwrite)) as region:
        with _backend(options.backend, options.threads, options.block_size) as backend:
            show = _begin(bar, part, f"{path}: write, read")
            rates = probe(
                region, backend, seconds=options.seconds, nbytes=options.size, on_progress=show
            )
            result |= {
                "file_system": "block device" if is_device else file_system_of(path).kind,
                "direct": region.direct,
                **_per_second(rates),
                "written_bytes": rates[Direction.WRITE].nbytes,
                "read_bytes": rates[Direction.READ].nbytes,
            }
            # A run begins with these rates, and its report has them as the ceiling. What runs have
            # observed counts for more, an earlier probe does not.
            of = PathIdentity.of(path.absolute(), region.fd, processes=1, backend=backend)
            observed = {way: one for way, one in load_rates(of).items() if one.source == "observed"}
            save_rates(of, {**rates, **observed})
            show = _begin(bar, part + 1, f"{path}: latency")
            seconds = options.seconds / 2
            latencies = write_latencies(
                region, backend, nbytes=_LATENCY_BYTES, seconds=seconds, on_progress=show
            )
            latencies.sort()
        result["write_latency"] = {
            "bytes": _LATENCY_BYTES,
            "count": len(latencies),
            "median_seconds": statistics.median(latencies),
            "p99_seconds": latencies[math.ceil(0.99 * len(latencies)) - 1],
        }
        sweep = result["sweep"] = list[dict[str, Any]]()
        if options.sweep:
            show = _begin(bar, part + 2, f"{path}: sweep")
            seconds = min(options.seconds, _SWEEP_SECONDS)
            kinds = [*itertools.product(_SWEEP_THREADS, _SWEEP_BLOCKS)]
            for number, (threads, block) in enumerate(kinds, start=1):
                with _backend(options.backend, threads, block) as backend:
                    found = probe(region, backend, seconds=seconds, nbytes=options.size)
                sweep.append({"threads": threads, "block_size": block, **_per_second(found)})
                show(number / len(kinds))


def _backend(name: str, threads: int, block_size: int) -> contextlib.closing[Backend]:
    return contextlib.closing(create_backend(name, threads=threads, block_size=block_size))


def _per_second(found: Rates) -> dict[str, float]:
    return {f"{way}_bytes_per_second": measured.rate for way, measured in found.items()}


def _gigabytes(rates: dict[str, Any]) -> tuple[float, float]:
    """Return GB/s written and read."""
    return rates["write_bytes_per_second"] / 1e9, rates["read_bytes_per_second"] / 1e9


def _print_tables(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    rows: list[tuple[str, ...]] = [
        ("path", "on", "I/O", "write GB/s", "read GB/s", "2 MiB write, ms: median", "99 %", "share")
    ]
    for one in [result for result in results if "direct" in result]:
        latency = one.get("write_latency", {})
        times = (latency.get(key, math.nan) * 1e3 for key in ("median_seconds", "p99_seconds"))
        figures = (f"{it:.2f}".replace("nan", "-") for it in (*_gigabytes(one), *times))
        how = "direct" if one["direct"] else "buffered"
        rows.append((one["path"], one["file_system"], how, *figures, f"{one['share']:.0%}"))
    if len(rows) > 1:
        size = format_size(options.block_size)
        print(f"{options.backend} backend, {options.threads} threads, blocks of {size}")
        print(_table(rows, left=3))
    for result in results:
        if result.get("sweep"):
            rows = [("threads", *map(format_size, _SWEEP_BLOCKS))]
            for threads, tried in itertools.groupby(result["sweep"], lambda one: one["threads"]):
                cells = [f"{write:.2f} / {read:.2f}" for write, read in map(_gigabytes, tried)]
                # A sweep that failed lacks the last figures.
                rows.append((str(threads), *cells, *["-"] * (len(_SWEEP_BLOCKS) - len(cells))))
            print(f"\n{result['path']}: write / read in GB/s by threads and block size")
            print(_table(rows, left=1))


def _table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Return lines of aligned columns, of which the first `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<"] * left + [">"] * (len(widths) - left)
    line = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(line.format(*row).rstrip() for row in rows)


_ABOUT = "Measure how fast paths write and read. Nothing is left on them."
COMMAND = Command("bench", _bench, "measure paths", _OPTIONS, _ABOUT)
