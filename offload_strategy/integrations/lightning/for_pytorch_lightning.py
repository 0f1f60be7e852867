"""Registers `Trainer(strategy="ssd_offload")` for `pytorch_lightning` when it is imported."""

from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning import strategies

from offload_strategy.integrations.lightning import engine_strategy, lightning_strategy
from offload_strategy.integrations.lightning.deepspeed_strategy import DeepSpeedOffloadMixin


class OffloadCheckpointIO(engine_strategy.StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for the Trainer of `pytorch_lightning`."""


class SSDOffloadDataParallelStrategy(
    lightning_strategy.OffloadStrategyMixin, strategies.DDPStrategy
):
    """A `DDPStrategy` whose processes share updates, for the Trainer of `pytorch_lightning`."""


class SSDOffloadStrategy(lightning_strategy.SingleDeviceMixin, strategies.SingleDeviceStrategy):
    """Trains with activations and optimizer states on host memory and SSDs, in `pytorch_lightning`.

    `LightningCLI` shows this; what it does is in `SingleDeviceMixin`.
    """

    parallel_class = SSDOffloadDataParallelStrategy


class SSDOffloadFSDPStrategy(lightning_strategy.ShardedMixin, strategies.ModelParallelStrategy):
    """`ShardedMixin` for the Trainer of `pytorch_lightning`."""


class SSDOffloadDeepSpeedStrategy(DeepSpeedOffloadMixin, strategies.DeepSpeedStrategy):
    """`DeepSpeedOffloadMixin` for the Trainer of `pytorch_lightning`."""


engine_strategy.register_in(
    strategies.StrategyRegistry,
    SSDOffloadStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadDeepSpeedStrategy,
)
