"""`Trainer(strategy="ssd_offload")` for `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload_strategy.integrations.lightning import OffloadStrategyMixin, register_in

if TYPE_CHECKING:
    # The same code under another name; the mixin is typed against this one.
    from lightning.pytorch.strategies import SingleDeviceStrategy
else:
    from pytorch_lightning.strategies import SingleDeviceStrategy


class SSDOffloadStrategy(OffloadStrategyMixin, SingleDeviceStrategy):
    """`OffloadStrategyMixin` for the Trainer of `pytorch_lightning`."""

    family = "pytorch_lightning"


def install(strategies: Any) -> None:
    """Register the strategy by name.

    Args:
        strategies: The module `pytorch_lightning.strategies`.
    """
    register_in(strategies.StrategyRegistry, SSDOffloadStrategy)
