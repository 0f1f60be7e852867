"""The config of a choice of settings, ready to use, with what its figures rest on as comments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError
from offload_strategy.planner.search.choice import Held
from offload_strategy.planner.search.cores import CpuRequest
from offload_strategy.planner.search.search_result import Candidate, Found, rounded
from offload_strategy.units import MiB, format_size

_TB = 1e12
_WIDTH = 96
#: A client's section, and which of its bytes its host tier holds.
_CLIENTS: dict[str, Held] = {
    "parameters": "weights",
    "activations": "activations",
    "optimizer": "states",
}


def config_yaml(found: Found, directories: Sequence[str]) -> str:
    """Write the best candidate as a config.

    Args:
        found: by a search.
        directories: on the drives, one or several.

    Returns:
        YAML that `OffloadConfig.load` reads.

    Raises:
        ConfigError: if nothing was found, or no directory is named.
    """
    if not directories:
        raise ConfigError("search: the config needs a directory on the drives; name at least one")
    best = found.best
    sections = _sections(found, best, directories)
    OffloadConfig.load(sections)
    comments = "".join(f"# {line}\n" for line in _comments(found, best))
    return f"{comments}\n{yaml.safe_dump(sections, sort_keys=False)}"


def _sections(found: Found, best: Candidate, directories: Sequence[str]) -> dict[str, Any]:
    placed, choice = best.placed, best.choice
    sections: dict[str, Any] = {}
    tiers: list[dict[str, Any]] = []
    for client, kind in _CLIENTS.items():
        if client not in best.moves:
            sections[client] = {"enabled": False}
            continue
        names = ["ssd"]
        capacity = placed.split(kind).host_bytes
        if isinstance(found.request, CpuRequest) and choice.overlap == "commit":
            # Of states old ones and new ones were counted; such a tier holds both for a while.
            capacity //= 2
        if capacity:
            names.insert(0, f"host-{kind}")
            tiers.append({"name": names[0], "kind": "dram", "capacity": _size(capacity)})
        sections[client] = {"enabled": True, "tiers": names}
    if not best.moves:
        return sections
    paths = directories[0] if len(directories) == 1 else list(directories)
    drives: dict[str, Any] = {"name": "ssd", "kind": "ssd", "path": paths}
    rated = found.request.drives.endurance_bytes
    if rated is not None:
        drives["endurance_tbw"] = round(rated / _TB)
    sections = {"tiers": [*tiers, drives], **sections}
    if "optimizer" in best.moves:
        sections["optimizer"] |= {
            "subgroup_size": placed.subgroup_size,
            "state_dtype": choice.state_dtype,
            "overlap": choice.overlap,
        }
        if choice.overlap == "commit":
            sections["optimizer"]["gradient_memory"] = _size(max(MiB, placed.gradient_bytes))
    if "parameters" in best.moves:
        sections["parameters"]["blocks_in_flight"] = choice.blocks_in_flight
    sections["memory"] = {"pinned": _size(placed.pinned_bytes)}
    if "activations" in best.moves:
        # What leaves was counted; what has to is measured in the first steps.
        limit: str = "auto"
        if isinstance(found.request, CpuRequest):
            limit = _size(found.request.limit_bytes)
        sections["planning"] = {"device_memory": limit}
    return sections


def _comments(found: Found, best: Candidate) -> Iterator[str]:
    request, choice = found.request, best.choice
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
    for fit in best.placed.fits:
        yield (
            f"Needs {format_size(fit.needed_bytes)} of {fit.what}, has "
            f"{format_size(fit.available_bytes)}."
        )
    yield ""
    yield "Your training script has to do the rest:"
    micro = choice.batch // choice.micro_batches
    passes = (
        "1 micro-batch" if choice.micro_batches == 1 else f"{choice.micro_batches} micro-batches"
    )
    yield f"- {passes} of {micro} x {choice.sequence} tokens a step"
    if choice.recomputed_layers == layers:
        yield "- checkpointing of all layers, such as model.gradient_checkpointing_enable()"
    elif choice.recomputed_layers:
        yield (
            f"- checkpointing of {choice.recomputed_layers} of the {layers} layers, by "
            f"torch.utils.checkpoint"
        )
    else:
        yield "- no checkpointing"
    if choice.overlap == "eager" and choice.moves_optimizer:
        yield "- no clipping and no loss scale, as overlap is eager"
    if best.moves and on_cpu:
        yield "- MALLOC_MMAP_THRESHOLD_=65536 in the environment of its process, so that memory"
        yield "  that is freed goes back to the system"
    if choice.moves_optimizer and not on_cpu:
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
