"""Callbacks for the Trainers of both Lightnings, and what loggers get in every framework."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_strategy.callbacks.dashboards import TENSORBOARD_LAYOUT
    from offload_strategy.callbacks.hints import MicroBatchHints
    from offload_strategy.callbacks.logged_metrics import LoggedMetrics
    from offload_strategy.callbacks.monitor import OffloadMonitor

__all__ = ["TENSORBOARD_LAYOUT", "LoggedMetrics", "MicroBatchHints", "OffloadMonitor"]

_HOMES = {
    "TENSORBOARD_LAYOUT": "offload_strategy.callbacks.dashboards",
    "LoggedMetrics": "offload_strategy.callbacks.logged_metrics",
    "MicroBatchHints": "offload_strategy.callbacks.hints",
    "OffloadMonitor": "offload_strategy.callbacks.monitor",
}


def __getattr__(name: str) -> Any:
    # Not at import: the callbacks derive from classes of the Lightning that the script has
    # imported.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
