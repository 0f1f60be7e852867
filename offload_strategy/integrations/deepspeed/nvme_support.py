"""Whether DeepSpeed can use NVMe on this machine; asked before it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.integrations.deepspeed.config_sections import uses_nvme
from offload_strategy.io.backends import deepnvme

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
    reason = deepnvme.unavailable_reason() if uses_nvme(sections) else None
    if reason is not None:
        zero = sections["zero_optimization"]
        places = [each["nvme_path"] for each in zero.values() if isinstance(each, Mapping)]
        raise ConfigError(
            f"DeepSpeed cannot move anything to {', '.join(dict.fromkeys(places))} here: {reason}. "
            "Or set optimizer.enabled and parameters.enabled to false, or give these sections "
            "tiers of kind dram."
        )
