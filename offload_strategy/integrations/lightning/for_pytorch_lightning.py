"""`Trainer(strategy="ssd_offload")` for `pytorch_lightning`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_strategy.integrations.lightning.checkpoint_io import StreamingCheckpointIO
from offload_strategy.integrations.lightning.deepspeed_strategy import (
    DeepSpeedOffloadMixin,
    register_deepspeed_in,
)
from offload_strategy.integrations.lightning.device_strategies import (
    DataParallelMixin,
    ShardedMixin,
    SingleDeviceMixin,
)
from offload_strategy.integrations.lightning.lightning_strategy import register_in

if TYPE_CHECKING:
    # The same code under another name; the mixin is typed against this one.
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        StrategyRegistry,
    )
else:
    from lightning_fabric.plugins import TorchCheckpointIO
    from pytorch_lightning.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
        StrategyRegistry,
    )


class OffloadCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for the Trainer of `pytorch_lightning`."""


class SSDOffloadDataParallelStrategy(DataParallelMixin, DDPStrategy):
    """`DataParallelMixin` for the Trainer of `pytorch_lightning`."""

    family = "pytorch_lightning"
    checkpoint_io_class = OffloadCheckpointIO


class SSDOffloadStrategy(SingleDeviceMixin, SingleDeviceStrategy):
    """Trains with activations and optimizer states on host memory and SSDs, in `pytorch_lightning`.

    `LightningCLI` shows this; what it does is in `SingleDeviceMixin`.
    """

    family = "pytorch_lightning"
    checkpoint_io_class = OffloadCheckpointIO
    parallel_class = SSDOffloadDataParallelStrategy


class SSDOffloadFSDPStrategy(ShardedMixin, ModelParallelStrategy):
    """`ShardedMixin` for the Trainer of `pytorch_lightning`."""

    family = "pytorch_lightning"
    checkpoint_io_class = OffloadCheckpointIO


class SSDOffloadDeepSpeedStrategy(DeepSpeedOffloadMixin, DeepSpeedStrategy):
    """`DeepSpeedOffloadMixin` for the Trainer of `pytorch_lightning`."""


# Importing this module registers the strategies, from a script or from the autoload hook.
register_in(StrategyRegistry, SSDOffloadStrategy)
register_in(StrategyRegistry, SSDOffloadFSDPStrategy)
register_deepspeed_in(StrategyRegistry, SSDOffloadDeepSpeedStrategy)
