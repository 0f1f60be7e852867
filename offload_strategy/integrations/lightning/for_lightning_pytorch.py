"""`Trainer(strategy="ssd_offload")` for `lightning.pytorch`."""

from __future__ import annotations

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import strategies

from offload_strategy.integrations.lightning import device_strategies
from offload_strategy.integrations.lightning.checkpoint_io import StreamingCheckpointIO
from offload_strategy.integrations.lightning.deepspeed_strategy import DeepSpeedOffloadMixin
from offload_strategy.integrations.lightning.engine_strategy import register_in
from offload_strategy.integrations.lightning.lightning_strategy import OffloadStrategyMixin


class OffloadCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for the Trainer of `lightning.pytorch`."""


class SSDOffloadDataParallelStrategy(OffloadStrategyMixin, strategies.DDPStrategy):
    """A `DDPStrategy` whose processes share updates, for the Trainer of `lightning.pytorch`."""


class SSDOffloadStrategy(device_strategies.SingleDeviceMixin, strategies.SingleDeviceStrategy):
    """Trains with activations and optimizer states on host memory and SSDs, in `lightning.pytorch`.

    `LightningCLI` shows this; what it does is in `SingleDeviceMixin`.
    """

    parallel_class = SSDOffloadDataParallelStrategy


class SSDOffloadFSDPStrategy(device_strategies.ShardedMixin, strategies.ModelParallelStrategy):
    """`ShardedMixin` for the Trainer of `lightning.pytorch`."""


class SSDOffloadDeepSpeedStrategy(DeepSpeedOffloadMixin, strategies.DeepSpeedStrategy):
    """`DeepSpeedOffloadMixin` for the Trainer of `lightning.pytorch`."""


# Importing this module registers the strategies, from a script or from the autoload hook.
register_in(
    strategies.StrategyRegistry,
    SSDOffloadStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadDeepSpeedStrategy,
)
