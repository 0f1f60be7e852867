"""`OffloadMonitor` with the loggers themselves, and `MicroBatchHints`."""

import math
import re
from pathlib import Path

import pytest
import torch

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.callbacks import TENSORBOARD_LAYOUT, MicroBatchHints, OffloadMonitor
from offload_strategy.callbacks.logged_metrics import LoggedMetrics
from tests.integrations.lightning_runs import assert_same, batches, fit, make_module, make_trainer
from tests.integrations.support import tensorboard_scalars

WRITTEN = "offload/optimizer/written_bytes"
CLIENTS = ("activations", "optimizer", "parameters")


def test_every_logger_gets_the_metrics_and_training_is_identical(pl, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = []
    board = pl.loggers.TensorBoardLogger(tmp_path)
    other = pl.loggers.WandbLogger(save_dir=str(tmp_path), offline=True)
    monkeypatch.setattr(other.experiment, "log", lambda row, *_, **__: rows.append(row))
    callbacks = [OffloadMonitor(every_n_steps=10), pl.callbacks.LearningRateMonitor("step")]
    # Steps count, and not batches.
    options = {"validate": True, "max_steps": 25, "accumulate_grad_batches": 2}
    run = fit(pl, tmp_path, "ssd_offload", callbacks=callbacks, logger=[board, other], **options)
    assert_same(run, fit(pl, tmp_path, "auto", **options))
    wandb.finish()
    wandb.teardown()
    scalars = tensorboard_scalars(Path(board.log_dir))
    last = run.engine.metrics()
    finite = {key for key, value in last.items() if math.isfinite(value)}
    rates = {key for key in scalars if key.startswith(("offload/bandwidth/", "offload/waits/"))}
    assert {f"offload/bandwidth/{way}_GBps" for way in ("read", "write")} < rates
    ours = {key for key in scalars if key.startswith("offload/")}
    assert ours == finite | rates
    for key in ours:
        assert [step for step, _ in scalars[key]] == [9, 19, 24]
    logged = [row for row in rows if WRITTEN in row]
    assert [row["trainer/global_step"] for row in logged] == [9, 19, 24]
    assert all(ours <= set(row) for row in logged)
    # Whether anything that a tiny model saves leaves, depends on the moment; states always do.
    written = [value for _, value in scalars[WRITTEN]]
    assert 0 < written[0] < written[1] < written[2] <= last[WRITTEN]

    for charts in TENSORBOARD_LAYOUT.values():
        for kind, names in charts.values():
            assert kind == "Multiline"
            for name in names:
                assert any(re.fullmatch(name, tag) for tag in scalars), name
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(tmp_path / "layout") as writer:
        writer.add_custom_scalars(TENSORBOARD_LAYOUT)


def test_the_progress_bar_shows_the_rates(pl, tmp_path, capsys):
    callbacks = [OffloadMonitor(every_n_steps=5), pl.callbacks.TQDMProgressBar(refresh_rate=1)]
    options = {"callbacks": callbacks, "enable_progress_bar": True, "max_steps": 15}
    trainer = fit(pl, tmp_path, "ssd_offload", **options).trainer
    shown = capsys.readouterr()
    for name in ("read_GBps=", "write_GBps="):
        assert name in shown.out + shown.err
    assert trainer.progress_bar_metrics["write_GBps"] > 0
    assert "read_GBps" not in trainer.logged_metrics


@pytest.mark.parametrize("callback", [OffloadMonitor, MicroBatchHints])
def test_a_trainer_without_an_engine_is_refused(pl, tmp_path, callback):
    module = make_module(pl)
    with pytest.raises(ConfigError, match=rf'{callback.__name__} finds no engine.*"ssd_offload"'):
        fit(pl, tmp_path, "auto", module, callbacks=[callback()])
    assert module.losses == []
    # Nothing trains here, so nothing is missing.
    trainer = make_trainer(pl, tmp_path, "auto", callbacks=[callback()])
    trainer.validate(module, batches(2), verbose=False)


def test_an_interval_below_one_is_refused():
    for steps in (0, -1):
        with pytest.raises(ConfigError, match="every_n_steps"):
            OffloadMonitor(every_n_steps=steps)


@pytest.mark.parametrize(
    "options", [{"max_steps": 9}, {"max_steps": -1, "max_epochs": 2, "limit_train_batches": 7}]
)
def test_callbacks_serve_an_engine_of_the_users_own_with_the_hints_of_the_strategy(
    pl, tmp_path, hints, options
):
    options = {"accumulate_grad_batches": 4, **options}
    plain = fit(pl, tmp_path, "auto", **options)
    # The callback adds nothing to the hints of the strategy.
    given = []
    for callbacks in ([], [MicroBatchHints()]):
        hints.clear()
        by_strategy = fit(pl, tmp_path, "ssd_offload", callbacks=callbacks, **options)
        given.append(list(hints))
    assert given[0] == given[1]
    # The first says before training that gradients will accumulate.
    expected = hints[1 : 1 + len(by_strategy.losses)]
    assert sum(expected) == by_strategy.trainer.global_step
    hints.clear()

    logger = pl.loggers.TensorBoardLogger(tmp_path)
    with OffloadEngine() as engine:
        module = make_module(pl)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module.configure_optimizers = lambda: engine.attach(module, optimizer)
        options["callbacks"] = [MicroBatchHints(engine), OffloadMonitor(2, engine=engine)]
        by_callback = fit(pl, tmp_path, "auto", module, logger=logger, **options)
    assert hints == expected
    assert_same(by_strategy, plain)
    assert_same(by_callback, plain)
    logged = tensorboard_scalars(Path(logger.log_dir))[WRITTEN]
    assert len(logged) == math.ceil(by_callback.trainer.global_step / 2)


def test_manual_optimization_has_no_hints(pl, tmp_path, hints):
    options = {"max_steps": -1, "max_epochs": 1}
    fit(pl, tmp_path, "ssd_offload", make_module(pl, manual=True), **options)
    assert hints == [False]  # at the end of fit: no step follows
    hints.clear()
    with OffloadEngine() as engine:
        module = make_module(pl, manual=True)
        engine.attach(module)
        fit(pl, tmp_path, "auto", module, callbacks=[MicroBatchHints(engine)], **options)
    assert hints == []


def test_loggers_get_rates_since_the_previous_time(monkeypatch):
    figures = ("written_bytes", "read_bytes", "stall_seconds")
    engine = {f"offload/{client}/{figure}": 0.0 for client in CLIENTS for figure in figures}
    engine["offload/endurance/projected_years"] = math.nan
    now = [100.0]
    monkeypatch.setattr("offload_strategy.callbacks.logged_metrics.perf_counter", lambda: now[0])
    logged = LoggedMetrics(lambda: dict(engine))
    expected = (2.0, 4e9, 2.0, 4.0, 0.5), (4.0, 2e9, 0.5, 1.0, 0.25)
    for seconds, moved, read, written, waited in expected:
        now[0] += seconds
        for key in ("activations/written", "optimizer/written", "optimizer/read"):
            engine[f"offload/{key}_bytes"] += moved
        engine["offload/activations/stall_seconds"] += 1.0
        metrics = logged.read()
        assert metrics["offload/bandwidth/read_GBps"] == read
        assert metrics["offload/bandwidth/write_GBps"] == written
        assert metrics["offload/waits/activations_share"] == waited
        assert metrics["offload/waits/optimizer_share"] == 0
        assert "offload/endurance/projected_years" not in metrics
    assert metrics["offload/optimizer/read_bytes"] == 6e9  # counters stay as they are
