"""Tells an engine which micro-batch runs, for Trainers with a strategy of Lightning's own."""

from __future__ import annotations

from typing import Any

from offload_strategy.callbacks.base import Callback, engine_of, require_engine
from offload_strategy.engine.offload_engine import OffloadEngine


class MicroBatchHints(Callback):
    """Tells the engine before each micro-batch whether it is the last before the optimizer's step.

    For an engine that the LightningModule attaches itself, in `configure_optimizers`. The strategy
    "ssd_offload" gives these hints without a callback; with it this one does nothing. Nor does it
    do anything with manual optimization, where nobody can tell in advance.

    Args:
        engine: The engine; None for that of the strategy.
    """

    def __init__(self, engine: OffloadEngine | None = None) -> None:
        super().__init__()
        self.engine = engine

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without an engine.

        Raises:
            ConfigError: If there is none.
        """
        if stage == "fit":
            require_engine(trainer, self.engine, self)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Give the hint."""
        engine = self.engine
        if engine is None or engine is engine_of(trainer) or not pl_module.automatic_optimization:
            return
        group = trainer.accumulate_grad_batches
        # Lightning also steps after the last batch of an epoch, with a group that is not full.
        ends_epoch = trainer.is_last_batch or batch_idx + 1 >= trainer.num_training_batches
        engine.microbatch(batch_idx % group, last=(batch_idx + 1) % group == 0 or ends_epoch)
