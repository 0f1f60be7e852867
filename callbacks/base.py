"""The class that our callbacks derive from, whichever Lightning is installed.

`lightning.pytorch` and `pytorch_lightning` each have a `Callback` class. A Trainer accepts anything
that has a callback's methods in its list of callbacks, but a callback given without a list, and one
named in a LightningCLI file, must be an instance of its own class. So `Callback` here derives from
the class of each install that is imported already, or else of the first one that can be. It has no
methods of its own: either parent's do nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from offload_strategy.engine.offload_engine import OffloadEngine
from offload_strategy.errors import ConfigError
from offload_strategy.integrations import TRAINERS, families_in_use

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as Callback


def _callback_classes() -> list[type]:
    families = families_in_use(TRAINERS, "offload_strategy.callbacks")
    return [importlib.import_module(f"{family}.callbacks").Callback for family in families]


if not TYPE_CHECKING:
    Callback = type("Callback", tuple(_callback_classes()), {"__module__": __name__})


def engine_of(trainer: Any) -> OffloadEngine | None:
    """Return the engine of the Trainer's strategy: None before `fit` has made it, or without one.

    Args:
        trainer: A Trainer of either Lightning.
    """
    engine = getattr(trainer.strategy, "offload_engine", None)
    return engine if isinstance(engine, OffloadEngine) else None


def require_engine(trainer: Any, engine: OffloadEngine | None, callback: Any) -> None:
    """Refuse a Trainer that has no engine for a callback.

    Args:
        trainer: A Trainer of either Lightning.
        engine: An engine that the user gave to the callback.
        callback: Who asks.

    Raises:
        ConfigError: If there is neither an engine nor a strategy that will make one.
    """
    if engine is None and not hasattr(trainer.strategy, "offload_engine"):
        name = type(callback).__name__
        raise ConfigError(
            f"{name} finds no engine: the Trainer's strategy is {type(trainer.strategy).__name__}. "
            f'Use Trainer(strategy="ssd_offload"), or {name}(engine=...) with an engine of your own'
        )
