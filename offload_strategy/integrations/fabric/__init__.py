"""The Fabric strategy, for whichever Fabric install is in use."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from offload_strategy.integrations.fabric.fabric_strategy import FAMILIES

if TYPE_CHECKING:
    from offload_strategy.integrations.fabric.for_lightning_fabric import SSDOffloadStrategy

__all__ = ["SSDOffloadStrategy"]


def __getattr__(name: str) -> Any:
    """Find `SSDOffloadStrategy` for the Fabric install in use.

    That is the imported install if only one is imported, else `lightning.fabric` if it is
    installed, else `lightning_fabric`.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    imported = [family for family in FAMILIES if family in sys.modules]
    installed = [family for family in FAMILIES if find_spec(family.partition(".")[0])]
    if not installed:
        raise ImportError(
            "SSDOffloadStrategy needs Fabric: pip install 'offload-strategy[lightning]'"
        )
    family = imported[0] if len(imported) == 1 else installed[0]
    return importlib.import_module(FAMILIES[family]).SSDOffloadStrategy
