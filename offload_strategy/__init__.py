"""Train models that do not fit: activations and optimizer states on host memory and SSDs.

Importing this package imports neither torch nor any framework; each public name imports what it
needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_strategy.checkpoints import load, save
    from offload_strategy.config import OffloadConfig
    from offload_strategy.engine.offload_engine import OffloadEngine
    from offload_strategy.errors import (
        ConfigError,
        CorruptDataError,
        OffloadError,
        StorageError,
        TierFullError,
    )
    from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin
    from offload_strategy.integrations.lightning import (
        SSDOffloadDeepSpeedStrategy,
        SSDOffloadFSDPStrategy,
        SSDOffloadStrategy,
    )

__version__ = "0.1.0"

_DEFINED_IN = {
    "OffloadConfig": "offload_strategy.config",
    "OffloadEngine": "offload_strategy.engine.offload_engine",
    "OffloadError": "offload_strategy.errors",
    "ConfigError": "offload_strategy.errors",
    "TierFullError": "offload_strategy.errors",
    "StorageError": "offload_strategy.errors",
    "CorruptDataError": "offload_strategy.errors",
    "SSDOffloadPlugin": "offload_strategy.integrations.accelerate.plugin",
    "SSDOffloadDeepSpeedStrategy": "offload_strategy.integrations.lightning",
    "SSDOffloadFSDPStrategy": "offload_strategy.integrations.lightning",
    "SSDOffloadStrategy": "offload_strategy.integrations.lightning",
    "load": "offload_strategy.checkpoints",
    "save": "offload_strategy.checkpoints",
}

__all__ = [
    "ConfigError",
    "CorruptDataError",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "SSDOffloadDeepSpeedStrategy",
    "SSDOffloadFSDPStrategy",
    "SSDOffloadPlugin",
    "SSDOffloadStrategy",
    "StorageError",
    "TierFullError",
    "__version__",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    module = _DEFINED_IN.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
