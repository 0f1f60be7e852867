"""The config file of the best settings, with the prediction and its assumptions as comments."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.planner.search.cpu_model import CpuModel
from offload_strategy.planner.search.search_result import SearchResult, rounded
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
    """Return the best candidate as a config file, or raise a ConfigError that says why not."""
    if not directories:
        raise ConfigError("search: the config needs a directory on the drives; name at least one")
    sections = _sections(found, directories)
    OffloadConfig.load(sections)
    comments = "".join(f"# {line}\n" for line in _comments(found))
    return f"{comments}\n{yaml.safe_dump(sections, sort_keys=False)}"


def _sections(found: SearchResult, directories: Sequence[str]) -> dict[str, Any]:
    best, model = found.best, found.model
    placement, settings = best.placement, best.settings
    sections: dict[str, Any] = {}
    tiers: list[dict[str, Any]] = []
    for client, kind in _CLIENTS.items():
        if client not in best.offloads:
            sections[client] = {"enabled": False}
            continue
        names = ["ssd"]
        capacity = placement.split(kind).host_bytes
        if model.on_cpu and settings.overlap == "commit":
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
    if model.drives.endurance_bytes is not None:
        drives["endurance_tbw"] = round(model.drives.endurance_bytes / _TB)
    if model.drives.writes_per_day is not None:
        drives["writes_per_day"] = model.drives.writes_per_day
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
        limit = _size(model.request.limit_bytes) if isinstance(model, CpuModel) else "auto"
        sections["planning"] = {"device_memory": limit}
    return sections


def _comments(found: SearchResult) -> Iterator[str]:
    best, model, settings = found.best, found.model, found.best.settings
    measured = "no step was measured" if model.on_cpu else "nothing was measured"
    yield f"Found by `ssd-offload plan --search`, by the analytical model: {measured}."
    yield from _wrapped(f"For {model.shape.parameters:,} parameters {model.machine}.")
    yield ""
    yield (
        f"Predicted: {rounded(best.tokens_per_second)} tokens/s, {best.step.seconds:.2f} s a step; "
        f"{best.step.limit} limits."
    )
    for fit in best.placement.fits:
        needed, available = format_size(fit.needed_bytes), format_size(fit.available_bytes)
        yield f"Needs {needed} of {fit.what}, has {available}."
    yield ""
    yield "Your training script has to do the rest:"
    passes = f"{settings.micro_batches} micro-batch{'es' if settings.micro_batches > 1 else ''}"
    yield f"- {passes} of {settings.micro_batch} x {settings.sequence} tokens a step"
    again, layers = settings.recomputed_layers, model.shape.layers
    if again == layers:
        yield "- checkpointing of all layers, such as model.gradient_checkpointing_enable()"
    elif again:
        yield f"- checkpointing of {again} of the {layers} layers with torch.utils.checkpoint"
    else:
        yield "- no checkpointing"
    if settings.overlap == "eager" and settings.offloads_optimizer:
        yield "- no clipping and no loss scale, because overlap is eager"
    if best.offloads and model.on_cpu:
        yield "- MALLOC_MMAP_THRESHOLD_=65536 in the environment of its process, so that freed"
        yield "  memory returns to the system"
    if settings.offloads_optimizer and not model.on_cpu:
        yield ""
        yield "States are counted with a float32 copy of half-precision weights. The package keeps"
        yield "one with optimizer.master_weights: true, which changes numbers: it is not set here."
    yield ""
    yield "Assumed:"
    for line in found.assumptions():
        yield from _wrapped(f"- {line}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / MiB)}MiB"
