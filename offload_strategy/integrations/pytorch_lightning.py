"""`Trainer(strategy="ssd_offload")` for `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_strategy.integrations.lightning import OffloadStrategyMixin, register_in

if TYPE_CHECKING:
    # The same code under another name; the mixin is typed against this one.
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
else:
    from pytorch_lightning.strategies import SingleDeviceStrategy, StrategyRegistry


class SSDOffloadStrategy(OffloadStrategyMixin, SingleDeviceStrategy):
    """`OffloadStrategyMixin` for the Trainer of `pytorch_lightning`."""

    family = "pytorch_lightning"


# Whoever imports this module first, the hook of the autoload or a script: it registers itself.
register_in(StrategyRegistry, SSDOffloadStrategy)
