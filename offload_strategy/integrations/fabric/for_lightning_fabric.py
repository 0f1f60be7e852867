"""Registers `Fabric(strategy="ssd_offload")` for `lightning.fabric` when it is imported."""

from lightning.fabric.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy

from offload_strategy.integrations.fabric import fabric_strategy
from offload_strategy.integrations.lightning.engine_strategy import StreamingCheckpointIO


class OffloadCheckpointIO(StreamingCheckpointIO, TorchCheckpointIO):
    """`StreamingCheckpointIO` for Fabric of `lightning.fabric`."""


class SSDOffloadDataParallelStrategy(fabric_strategy.OffloadFabricMixin, DDPStrategy):
    """A `DDPStrategy` whose processes share updates, for Fabric of `lightning.fabric`."""


class SSDOffloadStrategy(fabric_strategy.SingleDeviceFabricMixin, SingleDeviceStrategy):
    """`SingleDeviceFabricMixin` for Fabric of `lightning.fabric`."""

    parallel_class = SSDOffloadDataParallelStrategy


fabric_strategy.install(Fabric, STRATEGY_REGISTRY, SSDOffloadStrategy)
