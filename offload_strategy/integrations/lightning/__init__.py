"""The Lightning strategies, for whichever Lightning install is in use."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from offload_strategy.integrations.lightning.lightning_strategy import FAMILIES

if TYPE_CHECKING:
    from offload_strategy.integrations.lightning.for_lightning_pytorch import (
        SSDOffloadDeepSpeedStrategy,
        SSDOffloadFSDPStrategy,
        SSDOffloadStrategy,
    )

__all__ = ["SSDOffloadDeepSpeedStrategy", "SSDOffloadFSDPStrategy", "SSDOffloadStrategy"]


def __getattr__(name: str) -> Any:
    """Find a strategy for the Lightning install in use.

    That is the imported install if only one is imported, else `lightning.pytorch` if it is
    installed, else `pytorch_lightning`.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = [family for family in FAMILIES if family in sys.modules]
    installed = [family for family in FAMILIES if find_spec(family.partition(".")[0])]
    if not installed:
        raise ImportError(f"{name} needs Lightning: pip install 'offload-strategy[lightning]'")
    family = imported[0] if len(imported) == 1 else installed[0]
    return getattr(importlib.import_module(FAMILIES[family]), name)
