"""Registers `Trainer(strategy="ssd_offload")` for `pytorch_lightning` when it is imported."""

from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning import strategies

from offload_strategy.integrations.lightning.lightning_strategy import trainer_classes

(
    OffloadCheckpointIO,
    SSDOffloadDataParallelStrategy,
    SSDOffloadStrategy,
    SSDOffloadFSDPStrategy,
    SSDOffloadDeepSpeedStrategy,
) = trainer_classes(__name__, TorchCheckpointIO, strategies)
