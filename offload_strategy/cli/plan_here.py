"""`ssd-offload plan MODEL`: how a machine can train it, in three ways, and what to buy.

The machine is this one, except for what options say of it.

[Note: three ways]
The memory that training may take is made smaller and smaller, and each time the search finds the
fastest settings that fit. The first are the fastest of all, the last the cheapest: with less memory
nothing fits. The third are halfway between.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from offload_strategy.cli.options import check_writable
from offload_strategy.cli.plan_search import request_of
from offload_strategy.cli.this_machine import usual_directories
from offload_strategy.plan_runtime.profile import write_text
from offload_strategy.planner.hardware import table
from offload_strategy.planner.request import CpuRequest, Request
from offload_strategy.planner.search.search_result import SearchResult, Space, config_yaml
from offload_strategy.planner.search.settings_search import search
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import format_size, markdown_list

_WAYS = ("fastest", "in-between", "cheapest")
#: Each search has this share of the memory of the one before.
_LESS = 0.85
_MORE = (2, 4, 8, 16)


def plan_here(options: argparse.Namespace, shape: TransformerShape, length_from: str) -> int:
    """Print what the machine can train, and write the configs; return 1 if nothing fits."""
    files: dict[str, Path] = {}
    if (file := options.write_config) is not None:
        files = {way: file.with_stem(f"{file.stem}-{way}") for way in _WAYS} | {_WAYS[0]: file}
    for file in files.values():
        check_writable(file, options.force)
    options.dir = options.dir or [str(one) for one in usual_directories()]
    request = request_of(options, shape)
    space = Space((options.sequence,), 1 if options.batch is None else options.batch)
    fastest = search(request, space)
    ways = three_ways(fastest)
    texts = {way: config_yaml(one, options.dir) for way, one in ways.items()}
    best = replace(fastest, candidates=tuple(one.best for one in ways.values()))
    advice = list(doublings(fastest) if ways else fitting(fastest))
    length = f"Sequences have {options.sequence} tokens ({length_from})."
    if options.json:
        more = {"length": length, "advice": advice, "configs": texts}
        print(json.dumps(best.as_dict() | more, indent=2))
    else:
        fits = "It fits; the rows are: " + ", ".join(ways) if ways else "It does not fit"
        title = "To double the speed" if ways else "To make it fit"
        print(f"{fits}. {length}\n\n{best}\n\n{markdown_list(title, advice)}")
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
    """Return the results by name, fewer if there are none between; see [Note: three ways]."""
    found, one = list[SearchResult](), fastest
    while one.candidates:
        found.append(one)
        request, need = one.model.request, one.best.placement.fits[0].needed_bytes
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
    request, space = nothing.model.request, nothing.space
    batches = range(1, space.batch or 1)
    batch = bisect.bisect_left(
        batches, True, key=lambda batch: not search(request, replace(space, batch=batch)).candidates
    )
    assert nothing.nearest is not None
    for what, needed, has in map(astuple, nothing.nearest.fits):
        if needed > has:
            yield f"{what} is {format_size(needed - has)} too small"
    yield f"a batch of {batch} fits" if batch else "not even a batch of 1 fits"


def doublings(fastest: SearchResult) -> Iterator[str]:
    """Say what makes training at least twice as fast, by the model of the search, a line each."""
    request, space = fastest.model.request, fastest.space
    drives, batch = request.drives, space.batch or 1
    memory = "memory_bytes" if isinstance(request, CpuRequest) else "host_memory_bytes"
    has, now = getattr(request, memory), fastest.best.tokens_per_second
    gpus = sorted(table("device").values(), key=lambda one: one.flops)
    changes: dict[str, list[tuple[object, Request | CpuRequest, Space]]] = {
        "a larger batch": [(n * batch, request, replace(space, batch=n * batch)) for n in _MORE],
        "drives": [(f"{n}x", replace(request, drives=drives.times(n)), space) for n in _MORE],
        "memory": [(f"{n}x", replace(request, **{memory: n * has}), space) for n in _MORE],
        "GPU": [(gpu.name, Request(request.shape, gpu, drives, has), space) for gpu in gpus],
    }
    if isinstance(request, CpuRequest):
        more = [(n, replace(request, cores=request.cores.times(n))) for n in _MORE]
        changes["cores"] = [(f"{n}x", changed, space) for n, changed in more]
    for what, tried in changes.items():
        for amount, changed, searched in tried:
            found = search(changed, searched)
            gain = found.best.tokens_per_second / now if found.candidates else 0.0
            if gain >= 2:
                many = "more than 99" if gain > 99 else f"{gain:.1f}"
                yield f"{what}: {amount} makes it {many}x as fast"
                break
        else:
            yield f"{what}: {amount} does not make it twice as fast, nor does less"
