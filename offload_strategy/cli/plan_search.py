"""`ssd-offload plan --search`, and the cores of this machine.

The search gives the settings with the highest throughput, as a config file. With `--device cpu` the
machine is this one, as given or as measured in seconds.

[Note: one layer at two batches]
A layer of the model's kind, of its width or of 768, computes forward and backward for one sequence
and for four. The time of the three additional sequences is that of FLOP; the rest of the first's is
proportional to the parameters: weights are read from memory, gradients are written. The fastest of
a few runs counts, because other load only makes it slower.
"""

from __future__ import annotations

import argparse
import json
import shutil
import timeit
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import get_args

import psutil
import torch
from torch import nn

from offload_strategy.cli.options import check_writable
from offload_strategy.cli.this_machine import as_drives, known_path, this_gpu
from offload_strategy.config import default_directory
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.c_allocator import freed_memory
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.plan_runtime.profile import write_text
from offload_strategy.plan_runtime.space_requirements import Overlap
from offload_strategy.planner.hardware import Drive, device, drive_set
from offload_strategy.planner.request import Cores, CpuRequest, Request
from offload_strategy.planner.search.search_result import Space, config_yaml
from offload_strategy.planner.search.settings import StateType
from offload_strategy.planner.search.settings_search import search
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import MiB

#: Value of `--device` for a machine without a GPU.
CPU = "cpu"
#: Options that need `--search`.
_OPTIONS = ("max_batch", "max_tokens", "tolerance", "sequences", "allow")
#: Options that have an effect only on the CPU.
_OF_CPU = ("update_rate", "read", "write", "duplex")


def check_search_options(options: argparse.Namespace) -> None:
    """Raise a ConfigError that names options without effect with, or without, a search."""
    if options.script:
        named = ("profile", "model", "config_json", "search")
        _refuse(options, named, f"no effect with a script ({options.script[0]}): leave it out")
    if options.search and options.profile is not None:
        raise ConfigError("--search is for a model, --profile for a step of one: give one of them")
    if not options.search:
        _refuse(options, _OPTIONS, "give --search as well, or leave it out")
    if options.gpu not in (None, CPU) and not (options.profile or options.script):
        _refuse(
            options,
            _OF_CPU,
            "no effect for a GPU, which updates states itself and uses drives of the table; leave "
            "it out",
        )


def _refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    values = {name: getattr(options, name) for name in names}
    # By identity: 0 counts as given.
    found = [name for name, value in values.items() if value is not None and value is not False]
    if found:
        raise ConfigError(f"{', '.join('--' + name.replace('_', '-') for name in found)}: {why}")


def plan_search(options: argparse.Namespace, shape: TransformerShape) -> int:
    """Search, print the result and write the config; return 1 if nothing fits."""
    request = request_of(options, shape)
    if (file := options.write_config) is not None:
        check_writable(file, options.force)
    found = search(request, _space(options))
    print(json.dumps(found.as_dict(), indent=2) if options.json else found)
    if not found.candidates:
        return 1
    if file is not None:
        write_text(file, config_yaml(found, options.dir or [str(default_directory())]))
    return 0


def _space(options: argparse.Namespace) -> Space:
    allowed = options.allow or ()
    overlaps: tuple[Overlap, ...] = get_args(Overlap)
    dtypes: tuple[StateType, ...] = get_args(StateType)
    if options.batch is not None:
        _refuse(
            options, ("max_batch", "max_tokens"), "for a batch that is searched: leave out --batch"
        )
    names = ("batch", "max_batch", "max_tokens", "tolerance")
    values = {name: getattr(options, name) for name in names}
    return Space(
        sequences=tuple(options.sequences or (options.sequence,)),
        **{name: value for name, value in values.items() if value is not None},
        overlaps=tuple(one for one in overlaps if one != "eager" or one in allowed),
        state_dtypes=tuple(one for one in dtypes if one == "float32" or one in allowed),
    )


# ---------------------------------------------------------------------- this machine
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
_PROBE_SECONDS = 0.5


def request_of(options: argparse.Namespace, shape: TransformerShape) -> Request | CpuRequest:
    """Return the model and the machine: this one, except for what options say of it.

    The paths of `--dir` are measured, unless there is `--ssd`, or `--read` and `--write`, and so
    are the cores of a machine without a GPU, except for `--tflops` and `--update-rate`. Raises a
    ConfigError if an option is missing or wrong, and an OffloadError if a path cannot be measured.
    """
    named = options.gpu not in (None, CPU)
    gpu = device(options.gpu) if named else None if options.gpu else this_gpu()
    memory = options.host_memory or available_bytes()
    drives = replace(_drives_of(options), writes_per_day=options.writes_per_day)
    if gpu is not None:
        return Request(shape, gpu, drives, memory, options.flops)
    longest = max(options.sequences or [options.sequence])
    given = {"flops": options.flops, "update_rate": options.update_rate}
    cores = measured_cores(shape, longest, quickly=not options.search, **given)
    return CpuRequest(shape, cores, drives, memory, options.duplex)


def _drives_of(options: argparse.Namespace) -> Drive:
    """Return drives of the table, or all paths as one drive, with the rates given or measured."""
    if (options.read is None) != (options.write is None):
        raise ConfigError("give both of --read and --write, or none of them")
    if options.ssd is not None:
        if options.read is not None:
            raise ConfigError("give --ssd, or --read and --write, which say how fast it is")
        return drive_set(options.ssd)
    directories = options.dir or (default_directory(),)
    if options.read is None:
        return as_drives([known_path(one, _PROBE_SECONDS) for one in directories])
    try:
        free = sum(shutil.disk_usage(one).free for one in directories)
    except OSError as error:
        raise ConfigError(f"--dir: {error.filename}: {error.strerror or error}") from error
    name, sources = f"{len(directories)} x path", {"read_GBps": "given"}
    return Drive(name, options.read, options.write, free, sources=sources)


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
            flops, pass_seconds = _layer(shape, min(sequence, _LONGEST), quickly)
        finally:
            torch.set_num_threads(threads)
        flops, pass_seconds = flops * threads / used, pass_seconds * used / threads
    copy_rate = _copies()
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
    seen = replace(
        shape, kind="gpt", layers=1, hidden=width, heads=width // size, kv_heads=None,
        feed_forward=feed_forward, gated=False, head_size=None, decoder_layers=0,
    )  # fmt: skip
    sequence = _QUICK_LENGTH if quickly else sequence

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
    return min(timeit.repeat(run, "gc.enable()", number=1, repeat=_RUNS))
