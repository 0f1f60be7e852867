"""`OffloadMonitor` with the loggers themselves."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.callbacks import TENSORBOARD_LAYOUT, MicroBatchHints, OffloadMonitor
from tests.integrations.lightning_runs import (
    assert_same,
    batches,
    fit,
    make_module,
    make_trainer,
    with_engine,
)
from tests.integrations.support import tensorboard_scalars

WRITTEN = "offload/optimizer/written_bytes"
KEYS = [
    f"offload/{client}/{key}"
    for client in ("activations", "optimizer")
    for key in ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
]


def test_every_logger_gets_the_metrics_and_training_is_identical(pl: Any, tmp_path: Path) -> None:
    loggers = [pl.loggers.TensorBoardLogger(tmp_path, name=name) for name in ("one", "two")]
    callbacks = [OffloadMonitor(every_n_steps=10), pl.callbacks.LearningRateMonitor("step")]
    # Steps count, and not batches.
    options = {"validate": True, "max_steps": 25, "accumulate_grad_batches": 2}
    run = fit(pl, tmp_path, "ssd_offload", callbacks=callbacks, logger=loggers, **options)
    assert_same(run, fit(pl, tmp_path, "auto", **options))
    for logger in loggers:
        scalars = tensorboard_scalars(Path(logger.log_dir))
        for key in KEYS:
            assert [step for step, _ in scalars[key]] == [9, 19, 24]
    # Whether anything that a tiny model saves leaves, depends on the moment; states always do.
    written = [value for _, value in scalars[WRITTEN]]
    last = run.engine.metrics()
    assert 0 < written[0] < written[1] < written[2] <= last[WRITTEN]
    finite = {key for key, value in last.items() if math.isfinite(value)}
    rates = {key for key in scalars if key.startswith(("offload/bandwidth/", "offload/waits/"))}
    assert {key for key in scalars if key.startswith("offload/")} == finite | rates
    assert {f"offload/bandwidth/{way}_GBps" for way in ("read", "write")} < rates

    for charts in TENSORBOARD_LAYOUT.values():
        for kind, names in charts.values():
            assert kind == "Multiline"
            for name in names:
                assert any(re.fullmatch(name, tag) for tag in scalars), name
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "one") as writer:
        writer.add_custom_scalars(TENSORBOARD_LAYOUT)


def test_metrics_are_logged_to_a_run_of_wandb(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=True)
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(logger.experiment, "log", lambda row, *_, **__: rows.append(row))
    callbacks = [OffloadMonitor(every_n_steps=10)]
    fit(pl, tmp_path, "ssd_offload", logger=logger, callbacks=callbacks, max_steps=20)
    wandb.finish()
    wandb.teardown()
    logged = [row for row in rows if WRITTEN in row]
    assert [row["trainer/global_step"] for row in logged] == [9, 19]
    assert all(set(KEYS) <= set(row) for row in logged)


def test_the_progress_bar_shows_the_rates(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [OffloadMonitor(every_n_steps=5), pl.callbacks.TQDMProgressBar(refresh_rate=1)]
    options = {"callbacks": callbacks, "enable_progress_bar": True, "max_steps": 15}
    trainer = fit(pl, tmp_path, "ssd_offload", **options).trainer
    shown = capsys.readouterr()
    for name in ("read_GBps=", "write_GBps="):
        assert name in shown.out + shown.err
    assert trainer.progress_bar_metrics["write_GBps"] > 0
    assert "read_GBps" not in trainer.logged_metrics


@pytest.mark.parametrize("callback", [OffloadMonitor, MicroBatchHints])
def test_a_trainer_without_an_engine_is_refused_at_setup(
    pl: Any, tmp_path: Path, callback: Any
) -> None:
    module = make_module(pl)
    message = rf'{callback.__name__} finds no engine.*"ssd_offload"'
    with pytest.raises(ConfigError, match=message):
        fit(pl, tmp_path, "auto", module, callbacks=[callback()])
    assert module.losses == []
    # Nothing trains here, so nothing is missing.
    trainer = make_trainer(pl, tmp_path, "auto", callbacks=[callback()])
    trainer.validate(module, batches(2), verbose=False)


def test_it_takes_an_engine_of_the_users_own(pl: Any, tmp_path: Path) -> None:
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    with OffloadEngine() as engine:
        callbacks = [OffloadMonitor(every_n_steps=5, engine=engine)]
        module = with_engine(make_module(pl), engine)
        run = fit(pl, tmp_path, "auto", module, callbacks=callbacks, logger=logger, max_steps=10)
    assert len(tensorboard_scalars(Path(logger.log_dir))[WRITTEN]) == 2
    assert_same(run, fit(pl, tmp_path, "auto", max_steps=10))


@pytest.mark.parametrize("steps", [0, -1])
def test_an_interval_below_one_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match="every_n_steps"):
        OffloadMonitor(every_n_steps=steps)
