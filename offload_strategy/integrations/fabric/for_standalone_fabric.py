"""Registers `Fabric(strategy="ssd_offload")` for `lightning_fabric` (of `pytorch_lightning`)."""

from lightning_fabric import strategies
from lightning_fabric.fabric import Fabric
from lightning_fabric.plugins import TorchCheckpointIO

from offload_strategy.integrations.fabric.fabric_strategy import fabric_classes

OffloadCheckpointIO, SSDOffloadDataParallelStrategy, SSDOffloadStrategy = fabric_classes(
    __name__, TorchCheckpointIO, strategies, Fabric
)
