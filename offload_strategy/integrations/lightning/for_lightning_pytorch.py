"""Registers `Trainer(strategy="ssd_offload")` for `lightning.pytorch` when it is imported."""

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import strategies

from offload_strategy.integrations.lightning.lightning_strategy import trainer_classes

(
    OffloadCheckpointIO,
    SSDOffloadDataParallelStrategy,
    SSDOffloadStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadDeepSpeedStrategy,
) = trainer_classes(__name__, TorchCheckpointIO, strategies)
