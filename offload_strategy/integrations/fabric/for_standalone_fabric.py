"""Registers `Fabric(strategy="ssd_offload")` for `lightning_fabric` (of `pytorch_lightning`)."""

from lightning_fabric.fabric import Fabric
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.strategies import STRATEGY_REGISTRY, DDPStrategy, SingleDeviceStrategy

from offload_strategy.integrations.fabric import fabric_strategy
from offload_strategy.integrations.lightning.engine_strategy import StreamingCheckpointIO


class OffloadCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for Fabric of `lightning_fabric`."""


class SSDOffloadDataParallelStrategy(fabric_strategy.OffloadFabricMixin, DDPStrategy):
    """A `DDPStrategy` whose processes share updates, for Fabric of `lightning_fabric`."""


class SSDOffloadStrategy(fabric_strategy.SingleDeviceFabricMixin, SingleDeviceStrategy):
    """`SingleDeviceFabricMixin` for Fabric of `lightning_fabric`."""

    parallel_class = SSDOffloadDataParallelStrategy


fabric_strategy.install(Fabric, STRATEGY_REGISTRY, SSDOffloadStrategy)
