"""`ssd-offload plan MODEL`: how a machine can train it; with `--search` the fastest settings.

The machine is this one, except for what options say of it. Without `--search` the batch is given,
and the answer is in three ways, with what would make training twice as fast (docs/planning.md).
"""

from __future__ import annotations

import argparse
import bisect
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from offload_strategy.cli.options import given, refuse
from offload_strategy.cli.this_machine import as_drives, measured_cores, this_gpu, usual_directories
from offload_strategy.config import default_directory
from offload_strategy.config.value_types import Overlap, StateType
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.plan_runtime.profile import check_writable, write_text
from offload_strategy.planner.hardware import Drive, device, drive_set, table
from offload_strategy.planner.request import CpuRequest, Request
from offload_strategy.planner.search.search_result import SearchResult, Space, config_yaml, rounded
from offload_strategy.planner.search.settings_search import search
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import format_size, markdown_list, markdown_table

#: Value of `--device` for a machine without a GPU.
CPU = "cpu"
#: Options that have an effect only with GPUs.
OF_GPUS = ("devices", "machines", "interconnect", "network")
_WAYS = ("fastest", "in-between", "cheapest")
#: Each search has this share of the memory of the one before.
_LESS = 0.85
_MORE = (2, 4, 8, 16)


def plan_search(options: argparse.Namespace, shape: TransformerShape) -> int:
    """Search, print the result and write the config; return 1 if nothing fits."""
    if (file := options.write_config) is not None:
        check_writable(file, replace=options.force)
    found = search(request_of(options, shape), _space(options))
    growth = machine_growth(found)
    if options.json:
        print(json.dumps(found.as_dict() | growth_as_dict(growth), indent=2))
    else:
        print(found, *growth_table(growth), sep="\n\n")
    if not found.candidates:
        return 1
    if file is not None:
        write_text(file, config_yaml(found, options.dir or [str(default_directory())]))
    return 0


def _space(options: argparse.Namespace) -> Space:
    if options.batch is not None:
        why = "for a batch that is searched: leave out --batch"
        refuse(options, ("max_batch", "max_tokens"), why)
    chosen = given(options, "batch", "max_batch", "max_tokens", "tolerance")
    if "eager" in (options.allow or ()):
        chosen["overlaps"] = get_args(Overlap)
    if "bfloat16" in (options.allow or ()):
        chosen["state_dtypes"] = get_args(StateType)
    return Space(tuple(options.sequences or (options.sequence,)), **chosen)


def request_of(options: argparse.Namespace, shape: TransformerShape) -> Request | CpuRequest:
    """Return the model and the machine: this one, except for what options say of it.

    The paths of `--dir` are measured, unless there is `--ssd`, or `--read` and `--write`, and so
    are the cores of a machine without a GPU, except for `--tflops` and `--update-rate`. Raises a
    ConfigError if an option is missing or wrong, and an OffloadError if a path cannot be measured.
    """
    named = options.gpu not in (None, CPU)
    gpu = device(options.gpu) if named else None if options.gpu else this_gpu()
    if gpu is None:
        refuse(options, OF_GPUS, "for GPUs, each with a rank: leave it out, or say which --device")
    for name, several in (("network", "machines"), ("interconnect", "devices")):
        if getattr(options, several) in (None, 1):
            why = f"no effect with --{several} 1 (the default): give how many, or leave it out"
            refuse(options, [name], why)
    memory = options.host_memory or available_bytes()
    drives = replace(_drives_of(options), writes_per_day=options.writes_per_day)
    if gpu is not None:
        why = f"no effect for a GPU, such as this machine's: leave it out, or say --device {CPU}"
        refuse(options, ("update_rate", "duplex"), why)
        return Request(shape, gpu, drives, memory, options.tflops, **given(options, *OF_GPUS))
    longest = max(options.sequences or [options.sequence])
    rates = {"flops": options.tflops, "update_rate": options.update_rate}
    cores = measured_cores(shape, longest, quickly=not options.search, **rates)
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
        return as_drives(directories)
    try:
        free = sum(shutil.disk_usage(one).free for one in directories)
    except OSError as error:
        raise ConfigError(f"--dir: {error.filename}: {error.strerror or error}") from error
    name, sources = f"{len(directories)} x path", {"read": "given"}
    return Drive(name, options.read, options.write, free, sources=sources)


# ---------------------------------------------------------------------- three ways
def plan_here(options: argparse.Namespace, shape: TransformerShape, length_from: str) -> int:
    """Print what the machine can train, and write the configs; return 1 if nothing fits."""
    files: dict[str, Path] = {}
    if (file := options.write_config) is not None:
        files = {way: file.with_stem(f"{file.stem}-{way}") for way in _WAYS} | {_WAYS[0]: file}
    for file in files.values():
        check_writable(file, replace=options.force)
    options.dir = options.dir or [str(one) for one in usual_directories()]
    request = request_of(options, shape)
    space = Space((options.sequence,), 1 if options.batch is None else options.batch)
    fastest = search(request, space)
    ways = three_ways(fastest)
    texts = {way: config_yaml(one, options.dir) for way, one in ways.items()}
    best = replace(fastest, candidates=tuple(one.best for one in ways.values()))
    advice = list(doublings(fastest) if ways else fitting(fastest))
    growth = machine_growth(fastest)
    length = f"Sequences have {options.sequence} tokens ({length_from})."
    if options.json:
        more = {"length": length, "advice": advice, "configs": texts} | growth_as_dict(growth)
        print(json.dumps(best.as_dict() | more, indent=2))
    else:
        fits = "It fits; the rows are: " + ", ".join(ways) if ways else "It does not fit"
        title = "To double the speed" if ways else "To make it fit"
        print(f"{fits}. {length}", best, *growth_table(growth), sep="\n\n", end="\n\n")
        print(markdown_list(title, advice))
    for way, text in texts.items():
        # Printed without the comments at the top, which say the same as the tables.
        shown = text.partition("\n\n")[2]
        if files:
            write_text(files[way], text)
            shown = f"is in {files[way]}\n"
        if not options.json:
            print("", f"# {way}", shown, sep="\n", end="")
    return 0 if ways else 1


def three_ways(fastest: SearchResult) -> dict[str, SearchResult]:
    """Return the results by name, fewer if there are none between."""
    found, one = list[SearchResult](), fastest
    while one.candidates:
        found.append(one)
        request, need = one.request, one.best.placement.fits[0].needed_bytes
        if isinstance(request, CpuRequest):
            less: Any = {"memory_bytes": int(_LESS * min(request.memory_bytes, need))}
        else:
            memory = int(_LESS * min(request.device.memory_bytes, need))
            less = {"device": replace(request.device, memory_bytes=memory)}
        one = search(replace(request, **less), one.space)
    if len(found) < len(_WAYS):
        return dict(zip(_WAYS[::2], found, strict=False))
    return dict(zip(_WAYS, (found[0], found[len(found) // 2], found[-1]), strict=True))


def fitting(nothing: SearchResult) -> Iterator[str]:
    """Say what to take for a model that does not fit, a line each."""
    request, space = nothing.request, nothing.space
    batches = range(1, space.batch or 1)
    batch = bisect.bisect_left(
        batches, True, key=lambda batch: not search(request, replace(space, batch=batch)).candidates
    )
    for what, needed, has in min(nothing.refused, key=lambda placement: placement.shortage).fits:
        if needed > has:
            yield f"{what} is {format_size(needed - has)} too small"
    yield f"a batch of {batch} fits" if batch else "not even a batch of 1 fits"


def doublings(fastest: SearchResult) -> Iterator[str]:
    """Say what makes training at least twice as fast, by the model of the search, a line each."""
    request, space = fastest.request, fastest.space
    drives, batch = request.drives, space.batch or 1
    memory = "memory_bytes" if isinstance(request, CpuRequest) else "host_memory_bytes"
    has, now = getattr(request, memory), fastest.best.tokens_per_second
    known = {gpu.name: gpu for gpu in table("device").values()}  # which has aliases as well
    gpus = sorted(known.values(), key=lambda one: one.flops)
    on_gpu = Request(request.shape, gpus[0], drives, has)
    if not isinstance(request, CpuRequest):
        on_gpu = replace(request, sustained_flops=None)
    changes: dict[str, list[tuple[object, Request | CpuRequest, Space]]] = {
        "a larger batch": [(n * batch, request, replace(space, batch=n * batch)) for n in _MORE],
        "drives": [(f"{n}x", replace(request, drives=drives.times(n)), space) for n in _MORE],
        "memory": [(f"{n}x", replace(request, **{memory: n * has}), space) for n in _MORE],
        "GPU": [(gpu.name, replace(on_gpu, device=gpu), space) for gpu in gpus],
    }
    if isinstance(request, CpuRequest):
        cores = [(n, replace(request, cores=request.cores.times(n))) for n in _MORE]
        changes["cores"] = [(f"{n}x", changed, space) for n, changed in cores]
    elif request.machines > 1:
        counts = [n * request.machines for n in _MORE]
        changes["machines"] = [(n, replace(request, machines=n), space) for n in counts]
    for what, tried in changes.items():
        for amount, changed, searched in tried:
            is_new = (changed, searched) != (request, space)  # GPUs are tried with its own as well
            found = search(changed, searched) if is_new else fastest
            gain = found.best.tokens_per_second / now if found.candidates else 0.0
            if gain >= 2:
                many = "more than 99" if gain > 99 else f"{gain:.1f}"
                yield f"{what}: {amount} makes it {many}x as fast"
                break
        else:
            yield f"{what}: {amount} does not make it twice as fast, nor does less"


# ---------------------------------------------------------------------- several machines
def machine_growth(found: SearchResult) -> dict[int, SearchResult]:
    """Return the best settings for 1, 2, 4 and so on machines, and for all; {} for one machine."""
    request, most = found.request, found.request.machines
    if isinstance(request, CpuRequest) or most == 1:
        return {}
    fewer = [1 << k for k in range((most - 1).bit_length())]
    return {n: search(replace(request, machines=n), found.space) for n in fewer} | {most: found}


def growth_as_dict(growth: dict[int, SearchResult]) -> dict[str, Any]:
    """Return the best settings by number of machines, for JSON; None where nothing fits."""
    best = {n: one.best.as_dict() if one.candidates else None for n, one in growth.items()}
    return {"by_machines": best} if growth else {}


def growth_table(growth: dict[int, SearchResult]) -> Iterator[str]:
    """Yield a table of speed, and of what a step moves, by number of machines, if there is one."""
    rows, least = [], None
    for n, found in growth.items():
        if not found.candidates:
            rows.append((n, "nothing fits", *[""] * 6))
            continue
        one, step = found.best, found.best.step
        least = least or one.tokens_per_second / n
        speed, linear = rounded(one.tokens_per_second), one.tokens_per_second / n / least
        link = step.moved_bytes("to_device", "from_device")
        moved = link, one.read_bytes + one.written_bytes, step.moved_bytes("exchanged")
        sizes = (f"{nbytes / 1e9:.1f} GB" for nbytes in moved)
        rows.append((n, speed, f"{linear:.0%}", f"{step.seconds:.2f} s", step.limit, *sizes))
    if rows:
        yield markdown_table(
            "machines | tokens/s | of linear | step | limits | a link moves | the drives of a "
            "machine move | a rank exchanges",
            rows,
        )
