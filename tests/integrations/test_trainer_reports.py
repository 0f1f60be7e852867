"""Who sees the metrics that the Trainer reports; test_unmodified_scripts.py has what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import MLflowCallback

from tests.integrations.accelerate_runs import _fresh_accelerate
from tests.integrations.support import OFFLOAD_ALL
from tests.integrations.test_transformers import make_trainer, numbers

__all__ = ["_fresh_accelerate"]

WRITTEN = "offload/optimizer/written_bytes"


class Seen(TrainerCallback):
    """Notes what a callback of the script gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def mlflow_reporter() -> Any:
    """The callback of Transformers, over an MLflow that only notes its calls."""
    callback = MLflowCallback.__new__(MLflowCallback)
    callback._initialized, callback._async_log, callback._auto_end_run = True, False, False
    callback._ml_flow = mock.Mock()
    return callback


@pytest.mark.parametrize("before_the_others", [True, False])
def test_only_reporting_callbacks_see_the_metrics_and_each_step_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before_the_others: bool,
) -> None:
    plain = make_trainer(tmp_path, max_steps=5)
    plain.train()
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", json.dumps(OFFLOAD_ALL))
    monkeypatch.setenv("SSD_OFFLOAD_METRICS_EVERY", "2")
    capsys.readouterr()
    trainer, reporter, own = make_trainer(tmp_path, max_steps=5), mlflow_reporter(), Seen()
    place = 0 if before_the_others else len(trainer.callback_handler.callbacks)
    trainer.callback_handler.callbacks[place:place] = [reporter, own]
    trainer.train()
    calls = reporter._ml_flow.log_metrics.call_args_list
    ours = [call.kwargs["step"] for call in calls if WRITTEN in call.kwargs["metrics"]]
    assert ours == [1, 3, 5]
    assert len(calls) == 5 + 1  # one for each step, and the summary
    assert all(set(call.kwargs["metrics"]) & {"loss", "train_loss"} for call in calls)
    # All else is as without offload.
    assert any(isinstance(one, PrinterCallback) for one in trainer.callback_handler.callbacks)
    assert "'loss'" in (printed := capsys.readouterr().out)
    assert "offload/" not in printed
    assert not any(key.startswith("offload/") for logs in own.logs for key in logs)
    json.dumps(trainer.state.log_history)
    keys = [[sorted(row) for row in one.state.log_history] for one in (trainer, plain)]
    assert keys[0] == keys[1]
    assert numbers(trainer)[0] == numbers(plain)[0]


def test_a_trainer_that_does_not_offload_reports_nothing_of_ours(tmp_path: Path) -> None:
    trainer, reporter = make_trainer(tmp_path, max_steps=2), mlflow_reporter()
    trainer.add_callback(reporter)
    trainer.train()
    calls = reporter._ml_flow.log_metrics.call_args_list
    assert calls
    assert not any("offload/" in key for call in calls for key in call.kwargs["metrics"])


def test_metrics_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("SSD_OFFLOAD_METRICS_EVERY", "0")
    test_a_trainer_that_does_not_offload_reports_nothing_of_ours(tmp_path)
