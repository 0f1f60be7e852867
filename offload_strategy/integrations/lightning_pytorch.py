"""`Trainer(strategy="ssd_offload")` for `lightning.pytorch`."""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from offload_strategy.integrations.lightning import OffloadStrategyMixin, register_in


class SSDOffloadStrategy(OffloadStrategyMixin, SingleDeviceStrategy):
    """`OffloadStrategyMixin` for the Trainer of `lightning.pytorch`."""

    family = "lightning.pytorch"


# Whoever imports this module first, the hook of the autoload or a script: it registers itself.
register_in(StrategyRegistry, SSDOffloadStrategy)
