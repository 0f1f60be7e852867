"""From tiers to DeepSpeed's own sections: `offload_optimizer`, `offload_param` and `aio`.

With DeepSpeed, DeepSpeed itself moves optimizer states and weights. Options that its config lacks
are derived from our tiers, as the table in docs/deepspeed.md says; options that it has stay, unless
they contradict the tiers. Nothing here imports DeepSpeed.

[Note: NVMe below ZeRO-3]
DeepSpeed accepts `device: nvme` for ZeRO-1 and 2 and then silently keeps the states in host memory.
So nothing is derived from an ssd tier alone there.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

from offload_strategy.config import Client, OffloadConfig, TierConfig
from offload_strategy.errors import ConfigError
from offload_strategy.io.backends import deepnvme
from offload_strategy.units import MiB

_ZERO = "zero_optimization"
_SECTIONS: dict[Client, str] = {"optimizer": "offload_optimizer", "parameters": "offload_param"}

#: Staging buffers. Of its default, 4, Adam runs out when reads and writes overlap: each of two
#: subgroups under way takes a weight, a gradient and two moments, while a third is written.
_BUFFERS = 16
#: DeepSpeed's own number and size (in elements) of buffers for weights; fewer than that were not
#: tried.
_FEWEST_PARAMETER_BUFFERS = 5
_PARAMETER_BUFFER = 100_000_000
#: Bytes of an element in a buffer, at most: float32.
_ELEMENT_BYTES = 4


def for_activations(config: OffloadConfig) -> OffloadConfig:
    """Return the config of an engine that offloads only activations and leaves the rest."""
    return config.model_copy(
        update={client: getattr(config, client).resolved(enabled=False) for client in _SECTIONS}
    )


def derived_sections(
    deepspeed: Mapping[str, Any], config: OffloadConfig, largest_parameter: int | None = None
) -> dict[str, Any]:
    """Return the sections that DeepSpeed's config lacks and the tiers determine.

    The elements of the model's largest parameter have to fit into a buffer; None for DeepSpeed's
    default of 100 million. Raises a ConfigError if the configs contradict each other, or DeepSpeed
    does not have what ours asks.
    """
    zero = deepspeed.get(_ZERO) or {}
    if not isinstance(zero, Mapping):
        return {}  # DeepSpeed reports the error.
    stage = int(zero.get("stage", 0))
    _check_optimizer(config)
    derived: dict[str, Any] = {}
    for client, name in _SECTIONS.items():
        enabled = getattr(config, client).enabled
        if not enabled or (client == "parameters" and enabled == "auto"):
            continue
        given = zero.get(name)
        # Accelerate writes `device: none` where nobody asked for anything.
        if isinstance(given, Mapping) and given.get("device") not in (None, "none"):
            _check_agrees(client, given, config)
            continue
        place = _place(client, config, stage)
        if place is not None:
            derived[name] = _section(client, place, largest_parameter, config)
    if "offload_optimizer" in derived and stage == 3 and "sub_group_size" not in zero:
        elements = config.memory.pinned_bytes() // (_BUFFERS * _ELEMENT_BYTES)
        derived["sub_group_size"] = max(1, elements)
    sections: dict[str, Any] = {_ZERO: derived} if derived else {}
    if _nvme_paths(sections) and deepspeed.get("aio") is None:
        sections["aio"] = _aio(config)
    return sections


def merge_sections(deepspeed: MutableMapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Put derived sections into DeepSpeed's config, in place."""
    for key, value in sections.items():
        deepspeed[key] = {**(deepspeed.get(key) or {}), **value}


def check_nvme(sections: Mapping[str, Any]) -> None:
    """Raise a ConfigError if derived sections need NVMe and DeepSpeed cannot use it here.

    DeepSpeed compiles its asynchronous I/O at its first use, in the middle of its setup, where only
    the compiler reports what is missing.
    """
    paths = _nvme_paths(sections)
    reason = deepnvme.unavailable_reason() if paths else None
    if reason is not None:
        raise ConfigError(
            f"DeepSpeed cannot move anything to {', '.join(paths)} here: {reason}. "
            "Or set optimizer.enabled and parameters.enabled to false, or give these sections "
            "tiers of kind dram."
        )


def _nvme_paths(derived: Mapping[str, Any]) -> list[str]:
    sections = [derived.get(_ZERO, {}).get(name, {}) for name in _SECTIONS.values()]
    return list(dict.fromkeys(each["nvme_path"] for each in sections if "nvme_path" in each))


def _check_agrees(client: Client, given: Mapping[str, Any], config: OffloadConfig) -> None:
    if "tiers" not in config.model_fields_set:
        return  # Ours are only the defaults.
    tiers = config.tiers_for(client)
    device, path = given["device"], given.get("nvme_path")
    if device == "cpu":
        says = "device: cpu"
        agrees = any(tier.kind == "dram" for tier in tiers)
    else:
        says = f"device: {device}, nvme_path: {path}"
        agrees = path is not None and any(Path(path) in tier.paths for tier in tiers)
    if not agrees:
        name = _SECTIONS[client]
        raise ConfigError(
            f"DeepSpeed's {_ZERO}.{name} has {says}, and {client} of this config has "
            f"{_described(tiers)}. Remove {_ZERO}.{name}, which is then derived from the tiers; or "
            f"name the same place in both; or set {client}.enabled: false, and DeepSpeed's stands."
        )


def _check_optimizer(config: OffloadConfig) -> None:
    section = config.optimizer
    asked = {
        "state_dtype: bfloat16": section.state_dtype != "float32",
        "stochastic_rounding: true": section.stochastic_rounding,
        "master_weights: true": section.master_weights,
    }
    for what, is_asked in asked.items():
        if section.enabled and is_asked:
            raise ConfigError(
                f"optimizer.{what} is about updates of this package, and with DeepSpeed the "
                "updates are DeepSpeed's. Remove it (DeepSpeed keeps states and master weights in "
                "float32), or set optimizer.enabled: false."
            )


def _place(client: Client, config: OffloadConfig, stage: int) -> Path | Literal["cpu"] | None:
    """The directory for a client, or DeepSpeed's name of host memory; None at some ZeRO stages."""
    tiers = config.tiers_for(client)
    kinds = {tier.kind for tier in tiers}
    if client == "parameters" and stage != 3:
        raise ConfigError(
            f"parameters.enabled: true needs ZeRO-3 with DeepSpeed, and {_ZERO}.stage is {stage}: "
            "set it to 3, or parameters.enabled to false."
        )
    if stage == 3:
        if "ssd" not in kinds:
            return "cpu" if "dram" in kinds else None  # memory of the device is where they are
        path = next(path for tier in tiers for path in tier.paths)
        if config.io.encryption:
            raise ConfigError(
                f"io.encryption: true, and DeepSpeed writes {client} to files in {path} as they "
                "are: set it to false, or train without DeepSpeed's ZeRO-3."
            )
        if path.is_block_device():
            raise ConfigError(
                f"{path} is a block device, and DeepSpeed writes {client} to files: name a "
                f"directory of a file system first in {client}.tiers."
            )
        return path
    if stage in (1, 2) and "dram" in kinds:
        return "cpu"
    if config.optimizer.is_demanded:
        reason = "none is offloaded" if stage == 0 else "only host memory can take them"
        raise ConfigError(
            f"optimizer.enabled: true with {_described(tiers)}: of DeepSpeed's optimizer states "
            f"{reason} at {_ZERO}.stage {stage}. Set it to 3, or optimizer.enabled to false"
            + ("." if stage == 0 else ", or add a tier of kind dram.")
        )
    return None  # It was not asked for: see [Note: NVMe below ZeRO-3].


def _section(
    client: Client, place: Path | Literal["cpu"], largest: int | None, config: OffloadConfig
) -> dict[str, Any]:
    if place == "cpu":
        return {"device": "cpu", "pin_memory": True}
    section = {"device": "nvme", "pin_memory": True, "nvme_path": str(place)}
    if client == "optimizer":
        return section | {"buffer_count": _BUFFERS, "pipeline_read": True, "pipeline_write": True}
    size = _PARAMETER_BUFFER if largest is None else largest
    count = config.memory.pinned_bytes() // (size * _ELEMENT_BYTES)
    count = min(max(count, _FEWEST_PARAMETER_BUFFERS), _BUFFERS)
    return section | {"buffer_size": size, "buffer_count": count}


def _aio(config: OffloadConfig) -> dict[str, Any]:
    is_given = "block_size" in config.io.model_fields_set
    return {
        # What keeps an NVMe drive busy with few threads.
        "block_size": config.io.block_size if is_given else 1 * MiB,
        "queue_depth": 32,
        # More threads per request do not help where each has a queue as deep.
        "intra_op_parallelism": min(config.io.threads_to_use(), 8),
        "single_submit": False,
        "overlap_events": True,
    }


def _described(tiers: list[TierConfig]) -> str:
    memory = {"dram": "host memory", "device": "memory of the device"}
    parts = (
        f"{tier.name!r} ({memory.get(tier.kind) or ', '.join(map(str, tier.paths))})"
        for tier in tiers
    )
    return f"the tier{'s' if len(tiers) > 1 else ''} {', '.join(parts)}"
