"""The config file of the best settings, with the prediction and its assumptions as comments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.planner.search.cpu_request import CpuRequest
from offload_strategy.planner.search.search_result import Candidate, SearchResult, rounded
from offload_strategy.planner.search.settings import OffloadedKind
from offload_strategy.units import MiB, format_size

_TB = 1e12
_WIDTH = 96
#: Sections of the config, and the bytes that the host tier of each holds.
_CLIENTS: dict[str, OffloadedKind] = {
    "parameters": "weights",
    "activations": "activations",
    "optimizer": "states",
}


def config_yaml(found: SearchResult, directories: Sequence[str]) -> str:
    """Return the best candidate as a config file.

    Args:
        found: Result of a search.
        directories: Directories on the drives.

    Returns:
        YAML that `OffloadConfig.load` reads.

    Raises:
        ConfigError: If nothing fits, or no directory is named.
    """
    if not directories:
        raise ConfigError("search: the config needs a directory on the drives; name at least one")
    best = found.best
    sections = _sections(found, best, directories)
    OffloadConfig.load(sections)
    comments = "".join(f"# {line}\n" for line in _comments(found, best))
    return f"{comments}\n{yaml.safe_dump(sections, sort_keys=False)}"


def _sections(found: SearchResult, best: Candidate, directories: Sequence[str]) -> dict[str, Any]:
    placement, settings = best.placement, best.settings
    sections: dict[str, Any] = {}
    tiers: list[dict[str, Any]] = []
    for client, kind in _CLIENTS.items():
        if client not in best.offloads:
            sections[client] = {"enabled": False}
            continue
        names = ["ssd"]
        capacity = placement.split(kind).host_bytes
        if isinstance(found.request, CpuRequest) and settings.overlap == "commit":
            # Old and new states were both counted; the tier holds both for a while.
            capacity //= 2
        if capacity:
            names.insert(0, f"host-{kind}")
            tiers.append({"name": names[0], "kind": "dram", "capacity": _size(capacity)})
        sections[client] = {"enabled": True, "tiers": names}
    if not best.offloads:
        return sections
    paths = directories[0] if len(directories) == 1 else list(directories)
    drives: dict[str, Any] = {"name": "ssd", "kind": "ssd", "path": paths}
    rated = found.request.drives.endurance_bytes
    if rated is not None:
        drives["endurance_tbw"] = round(rated / _TB)
    sections = {"tiers": [*tiers, drives], **sections}
    if "optimizer" in best.offloads:
        sections["optimizer"] |= {
            "subgroup_size": placement.subgroup_size,
            "state_dtype": settings.state_dtype,
            "overlap": settings.overlap,
        }
        if settings.overlap == "commit":
            sections["optimizer"]["gradient_memory"] = _size(max(MiB, placement.gradient_bytes))
    if "parameters" in best.offloads:
        sections["parameters"]["blocks_in_flight"] = settings.blocks_in_flight
    sections["memory"] = {"pinned": _size(placement.pinned_bytes)}
    if "activations" in best.offloads:
        # The search counted what leaves; the run measures in its first steps what has to leave.
        limit: str = "auto"
        if isinstance(found.request, CpuRequest):
            limit = _size(found.request.limit_bytes)
        sections["planning"] = {"device_memory": limit}
    return sections


def _comments(found: SearchResult, best: Candidate) -> Iterator[str]:
    request, settings = found.request, best.settings
    layers = request.shape.layers
    on_cpu = isinstance(request, CpuRequest)
    measured = "no step was measured" if on_cpu else "nothing was measured"
    yield f"Found by `ssd-offload plan --search`, by the analytical model: {measured}."
    yield from _wrapped(f"For {request.shape.parameters:,} parameters {found.machine()}.")
    yield ""
    yield (
        f"Predicted: {rounded(best.tokens_per_second)} tokens/s, {best.step.seconds:.2f} s a step; "
        f"{best.step.limit} limits."
    )
    for fit in best.placement.fits:
        yield (
            f"Needs {format_size(fit.needed_bytes)} of {fit.what}, has "
            f"{format_size(fit.available_bytes)}."
        )
    yield ""
    yield "Your training script has to do the rest:"
    micro = settings.batch // settings.micro_batches
    passes = (
        "1 micro-batch"
        if settings.micro_batches == 1
        else f"{settings.micro_batches} micro-batches"
    )
    yield f"- {passes} of {micro} x {settings.sequence} tokens a step"
    if settings.recomputed_layers == layers:
        yield "- checkpointing of all layers, such as model.gradient_checkpointing_enable()"
    elif settings.recomputed_layers:
        yield (
            f"- checkpointing of {settings.recomputed_layers} of the {layers} layers with "
            f"torch.utils.checkpoint"
        )
    else:
        yield "- no checkpointing"
    if settings.overlap == "eager" and settings.offloads_optimizer:
        yield "- no clipping and no loss scale, because overlap is eager"
    if best.offloads and on_cpu:
        yield "- MALLOC_MMAP_THRESHOLD_=65536 in the environment of its process, so that freed"
        yield "  memory returns to the system"
    if settings.offloads_optimizer and not on_cpu:
        yield ""
        yield "States are counted with a float32 copy of half-precision weights. The package keeps"
        yield "one with optimizer.master_weights: true, which changes numbers: it is not set here."
    yield ""
    yield "Assumed:"
    for line in found.assumptions():
        yield from _wrapped(f"- {line}")


def _wrapped(text: str) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + len(word) >= _WIDTH:
            yield line
            line = " "
        line = f"{line} {word}" if line else word
    yield line


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / MiB)}MiB"
