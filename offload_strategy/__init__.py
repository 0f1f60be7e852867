"""Train models that do not fit: activations and optimizer states on host memory and SSDs.

Importing this package imports neither torch nor any framework; each public name imports what it
needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_strategy.checkpoints import load as load
    from offload_strategy.checkpoints import save as save
    from offload_strategy.config import OffloadConfig as OffloadConfig
    from offload_strategy.engine.offload_engine import OffloadEngine as OffloadEngine
    from offload_strategy.errors import ConfigError as ConfigError
    from offload_strategy.errors import CorruptDataError as CorruptDataError
    from offload_strategy.errors import OffloadError as OffloadError
    from offload_strategy.errors import StorageError as StorageError
    from offload_strategy.errors import TierFullError as TierFullError
    from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin as SSDOffloadPlugin
    from offload_strategy.integrations.lightning import (
        SSDOffloadDeepSpeedStrategy as SSDOffloadDeepSpeedStrategy,
    )
    from offload_strategy.integrations.lightning import (
        SSDOffloadFSDPStrategy as SSDOffloadFSDPStrategy,
    )
    from offload_strategy.integrations.lightning import SSDOffloadStrategy as SSDOffloadStrategy

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

__all__ = [*_DEFINED_IN, "__version__"]


def __getattr__(name: str) -> Any:
    module = _DEFINED_IN.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
