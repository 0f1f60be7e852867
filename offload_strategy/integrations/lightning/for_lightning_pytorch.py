"""Registers `Trainer(strategy="ssd_offload")` for `lightning.pytorch` when it is imported."""

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import strategies

from offload_strategy.integrations.lightning import engine_strategy, lightning_strategy
from offload_strategy.integrations.lightning.deepspeed_strategy import DeepSpeedOffloadMixin


class OffloadCheckpointIO(engine_strategy.StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for the Trainer of `lightning.pytorch`."""


class SSDOffloadDataParallelStrategy(
    lightning_strategy.OffloadStrategyMixin, strategies.DDPStrategy
):
    """A `DDPStrategy` whose processes share updates, for the Trainer of `lightning.pytorch`."""


class SSDOffloadStrategy(lightning_strategy.SingleDeviceMixin, strategies.SingleDeviceStrategy):
    """Trains with activations and optimizer states on host memory and SSDs, in `lightning.pytorch`.

    `LightningCLI` shows this; what it does is in `SingleDeviceMixin`.
    """

    parallel_class = SSDOffloadDataParallelStrategy


class SSDOffloadFSDPStrategy(lightning_strategy.ShardedMixin, strategies.ModelParallelStrategy):
    """`ShardedMixin` for the Trainer of `lightning.pytorch`."""


class SSDOffloadDeepSpeedStrategy(DeepSpeedOffloadMixin, strategies.DeepSpeedStrategy):
    """`DeepSpeedOffloadMixin` for the Trainer of `lightning.pytorch`."""


engine_strategy.register_in(
    strategies.StrategyRegistry,
    SSDOffloadStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadDeepSpeedStrategy,
)
