"""Registers `Fabric(strategy="ssd_offload")` for `lightning.fabric` when it is imported."""

from lightning.fabric import strategies
from lightning.fabric.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO

from offload_strategy.integrations.fabric.fabric_strategy import fabric_classes

OffloadCheckpointIO, SSDOffloadDataParallelStrategy, SSDOffloadStrategy = fabric_classes(
    __name__, TorchCheckpointIO, strategies, Fabric
)
