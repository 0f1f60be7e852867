"""`OffloadMonitor` with the loggers themselves."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

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

KEYS = [
    f"offload/{client}/{key}"
    for client in ("activations", "optimizer")
    for key in ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
]


def on_board(pl: Any, root: Path, *, strategy: Any = "ssd_offload", **options: Any) -> Any:
    """A run, and what TensorBoard reads of it."""
    logger = pl.loggers.TensorBoardLogger(root, name="board")
    run = fit(pl, root, strategy, logger=logger, **options)
    return run, tensorboard_scalars(Path(logger.log_dir))


def test_metrics_are_in_the_tensorboard_file(pl: Any, tmp_path: Path) -> None:
    run, scalars = on_board(
        pl, tmp_path, callbacks=[OffloadMonitor(every_n_steps=10)], max_steps=25
    )
    for key in KEYS:
        assert [step for step, _ in scalars[key]] == [9, 19, 24]
    # Whether anything that a tiny model saves leaves, depends on the moment; states always do.
    written = [value for _, value in scalars["offload/optimizer/written_bytes"]]
    assert 0 < written[0] < written[1] < written[2]
    last = run.engine.metrics()
    finite = {key for key, value in last.items() if math.isfinite(value)}
    rates = {key for key in scalars if key.startswith(("offload/bandwidth/", "offload/waits/"))}
    assert {key for key in scalars if key.startswith("offload/")} == finite | rates
    assert {f"offload/bandwidth/{way}_GBps" for way in ("read", "write")} < rates
    assert written[-1] <= last["offload/optimizer/written_bytes"]


def test_every_chart_of_the_layout_shows_a_metric(pl: Any, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    _, scalars = on_board(pl, tmp_path, callbacks=[OffloadMonitor()], max_steps=2)
    for charts in TENSORBOARD_LAYOUT.values():
        for kind, names in charts.values():
            assert kind == "Multiline"
            for name in names:
                assert any(re.fullmatch(name, tag) for tag in scalars), name
    with tensorboard.SummaryWriter(tmp_path / "board") as writer:
        writer.add_custom_scalars(TENSORBOARD_LAYOUT)


def test_metrics_are_logged_to_a_run_of_wandb(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=True)
    callbacks = [OffloadMonitor(every_n_steps=10)]
    with mock.patch.object(logger.experiment, "log", wraps=logger.experiment.log) as log:
        fit(pl, tmp_path, "ssd_offload", logger=logger, callbacks=callbacks, max_steps=20)
    wandb.finish()
    wandb.teardown()
    logged = [call.args[0] for call in log.call_args_list if KEYS[0] in call.args[0]]
    assert [row["trainer/global_step"] for row in logged] == [9, 19]
    assert all(set(KEYS) <= set(row) for row in logged)


def test_every_logger_gets_them(pl: Any, tmp_path: Path) -> None:
    loggers = [pl.loggers.TensorBoardLogger(tmp_path, name=name) for name in ("one", "two")]
    callbacks = [OffloadMonitor(every_n_steps=1)]
    fit(pl, tmp_path, "ssd_offload", logger=loggers, callbacks=callbacks, max_steps=3)
    for logger in loggers:
        steps = [step for step, _ in tensorboard_scalars(Path(logger.log_dir))[KEYS[0]]]
        assert steps == [0, 1, 2]


def test_accumulation_counts_steps_and_not_batches(pl: Any, tmp_path: Path) -> None:
    options = {"accumulate_grad_batches": 4, "max_steps": 6}
    _, scalars = on_board(pl, tmp_path, callbacks=[OffloadMonitor(every_n_steps=2)], **options)
    assert [step for step, _ in scalars[KEYS[0]]] == [1, 3, 5]


def test_the_progress_bar_shows_the_rates(
    pl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = pl.callbacks.TQDMProgressBar(refresh_rate=1)
    run = fit(
        pl,
        tmp_path,
        "ssd_offload",
        callbacks=[OffloadMonitor(every_n_steps=5), bar],
        enable_progress_bar=True,
        max_steps=15,
    )
    shown = capsys.readouterr()
    for name in ("read_GBps=", "write_GBps="):
        assert name in shown.out + shown.err
    assert run.trainer.progress_bar_metrics["write_GBps"] > 0
    assert "read_GBps" not in run.trainer.logged_metrics


def test_training_is_identical_with_the_monitor(pl: Any, tmp_path: Path) -> None:
    callbacks = [OffloadMonitor(every_n_steps=1), pl.callbacks.LearningRateMonitor("step")]
    options = {"validate": True, "max_steps": 12}
    logger = pl.loggers.CSVLogger(tmp_path)
    watched = fit(pl, tmp_path, "ssd_offload", callbacks=callbacks, logger=logger, **options)
    assert_same(watched, fit(pl, tmp_path, "auto", **options))


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
    with OffloadEngine() as engine:
        callbacks = [OffloadMonitor(every_n_steps=5, engine=engine)]
        module = with_engine(make_module(pl), engine)
        options = {"module": module, "callbacks": callbacks, "max_steps": 10}
        run, scalars = on_board(pl, tmp_path, strategy="auto", **options)
    assert len(scalars[KEYS[0]]) == 2
    assert_same(run, fit(pl, tmp_path, "auto", max_steps=10))


@pytest.mark.parametrize("steps", [0, -1])
def test_an_interval_below_one_is_refused(steps: int) -> None:
    with pytest.raises(ConfigError, match="every_n_steps"):
        OffloadMonitor(every_n_steps=steps)
