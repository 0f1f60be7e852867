"""Sends what the engine measures to loggers and the progress bar."""

from __future__ import annotations

from typing import Any

from offload_strategy.callbacks.base import Callback, engine_of, require_engine
from offload_strategy.callbacks.logged_metrics import LoggedMetrics
from offload_strategy.engine.offload_engine import OffloadEngine
from offload_strategy.errors import ConfigError

_RATES = ("read_GBps", "write_GBps")


class OffloadMonitor(Callback):
    """Sends the engine's metrics to every logger, and read and write rates to the progress bar.

    The metrics are those of `engine.metrics()`, and rates since they were sent before.

    Args:
        every_n_steps: Optimizer steps between two sets of metrics. The last step's are always sent.
        engine: The engine; None for that of the strategy "ssd_offload".
        progress_bar: Whether to show `read_GBps` and `write_GBps`, averaged over the same steps.

    Raises:
        ConfigError: If `every_n_steps` is below 1, or, when `fit` begins, if there is no engine.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        engine: OffloadEngine | None = None,
        progress_bar: bool = True,
    ) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ConfigError(
                f"OffloadMonitor: every_n_steps is {every_n_steps}, allowed are 1 and up"
            )
        self.every_n_steps = every_n_steps
        self.engine = engine
        self.progress_bar = progress_bar
        self._logged_step = 0
        self._logged: LoggedMetrics | None = None
        self._shown = dict.fromkeys(_RATES, 0.0)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a Trainer without an engine.

        Raises:
            ConfigError: If there is none.
        """
        if stage == "fit":
            require_engine(trainer, self.engine, self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count, also when training goes on from a checkpoint."""
        self._logged_step = trainer.global_step
        engine = self.engine or engine_of(trainer)
        self._logged = None if engine is None else LoggedMetrics(engine.metrics)
        self._shown = dict.fromkeys(_RATES, 0.0)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send the metrics if they are due, and show the rates."""
        step = trainer.global_step
        # Not `step % n`: a batch may make no step (accumulation), or several (manual optimization).
        if step // self.every_n_steps > self._logged_step // self.every_n_steps:
            self._send(trainer)
        if self.progress_bar:
            self.log_dict(self._shown, prog_bar=True, logger=False)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Send the metrics of the last step."""
        if trainer.global_step > self._logged_step:
            self._send(trainer)

    def _send(self, trainer: Any) -> None:
        step = trainer.global_step
        self._logged_step = step
        engine = self.engine or engine_of(trainer)
        if engine is None or engine.closed:
            return
        if self._logged is None:  # the strategy made the engine in the first batch
            self._logged = LoggedMetrics(engine.metrics)
        metrics = self._logged.read()
        self._shown = {name: metrics[f"offload/bandwidth/{name}"] for name in _RATES}
        for logger in trainer.loggers:
            # The step before the update, as for the loss that Lightning logs for the same batch.
            logger.log_metrics(metrics, step=step - 1)
