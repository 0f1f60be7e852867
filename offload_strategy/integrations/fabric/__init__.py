"""The Fabric strategy, for whichever Fabric install is in use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload_strategy.integrations import FABRICS, FAMILIES, families_in_use

if TYPE_CHECKING:
    from offload_strategy.integrations.fabric.fabric_strategy import (
        SingleDeviceFabricMixin as SSDOffloadStrategy,
    )

__all__ = ["SSDOffloadStrategy"]


def __getattr__(name: str) -> Any:
    """Find `SSDOffloadStrategy` for the Fabric in use; of `lightning` if both are imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    (family, *_) = families_in_use(FABRICS, name)
    return importlib.import_module(FAMILIES[family]).SSDOffloadStrategy
