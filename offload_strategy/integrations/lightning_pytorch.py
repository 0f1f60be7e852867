"""`Trainer(strategy="ssd_offload")` for `lightning.pytorch`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from offload_strategy.integrations.lightning import OffloadStrategyMixin, register_in


class SSDOffloadStrategy(OffloadStrategyMixin, SingleDeviceStrategy):
    """`OffloadStrategyMixin` for the Trainer of `lightning.pytorch`."""

    family = "lightning.pytorch"


def install(strategies: Any) -> None:
    """Register the strategy by name.

    Args:
        strategies: The module `lightning.pytorch.strategies`.
    """
    register_in(strategies.StrategyRegistry, SSDOffloadStrategy)
