"""Whether DeepSpeed can use NVMe on this machine; asked before it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.integrations.deepspeed_sections import uses_nvme

__all__ = ["check_nvme"]


def check_nvme(sections: Mapping[str, Any]) -> None:
    """See to it that sections that were derived can work here.

    DeepSpeed compiles its asynchronous I/O when it is first used, in the middle of its set-up, and
    what is missing for that is then said by a compiler.

    Args:
        sections: Those of `derived_sections`.

    Raises:
        ConfigError: They move something to NVMe, and DeepSpeed's asynchronous I/O cannot be built.
    """
    if not uses_nvme(sections):
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            "DeepSpeed's asynchronous I/O cannot be built here, by which it would move to "
            f"{_place(sections)}: it needs libaio (apt-get install libaio-dev), ninja and a C++ "
            "compiler. Install them, or set optimizer.enabled and parameters.enabled to false, or "
            "give these sections tiers of kind dram."
        )


def _place(sections: Mapping[str, Any]) -> str:
    zero = sections["zero_optimization"]
    paths = [zero[name]["nvme_path"] for name in zero if "nvme_path" in _mapping(zero[name])]
    return ", ".join(dict.fromkeys(paths))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
