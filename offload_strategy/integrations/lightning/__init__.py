"""The Lightning strategies, for whichever Lightning install is in use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload_strategy.integrations import FAMILIES, TRAINERS, families_in_use

if TYPE_CHECKING:
    from offload_strategy.integrations.lightning.deepspeed_strategy import (
        DeepSpeedOffloadMixin as SSDOffloadDeepSpeedStrategy,
    )
    from offload_strategy.integrations.lightning.lightning_strategy import (
        ShardedMixin as SSDOffloadFSDPStrategy,
    )
    from offload_strategy.integrations.lightning.lightning_strategy import (
        SingleDeviceMixin as SSDOffloadStrategy,
    )

__all__ = ["SSDOffloadDeepSpeedStrategy", "SSDOffloadFSDPStrategy", "SSDOffloadStrategy"]


def __getattr__(name: str) -> Any:
    """Find a strategy for the Lightning install in use; `lightning` if both are imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    (family, *_) = families_in_use(TRAINERS, name)
    return getattr(importlib.import_module(FAMILIES[family]), name)
