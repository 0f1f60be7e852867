"""Metrics in what `report_to` of the Trainers of Transformers and TRL names."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import MLflowCallback

from tests.integrations.accelerate_runs import _fresh_accelerate
from tests.integrations.support import OFFLOAD_ALL, python, succeeded, tensorboard_scalars
from tests.integrations.test_transformers import make_trainer, numbers
from tests.integrations.test_unmodified_scripts import SCRIPTS

__all__ = ["_fresh_accelerate"]

LAUNCHER = "from accelerate.commands.accelerate_cli import main; main()"
WRITTEN = "offload/optimizer/written_bytes"
RATES = {
    "offload/bandwidth/read_GBps",
    "offload/bandwidth/write_GBps",
    "offload/waits/activations_share",
    "offload/waits/optimizer_share",
    "offload/waits/parameters_share",
}
GROUPS = {"activations", "bandwidth", "endurance", "memory", "optimizer", "tier", "waits"}


# ---------------------------------------------------------------------- scripts nobody changed
def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """What an offline run of W&B has logged, row by row."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, place, record = file.read_bytes(), 7, b""
    while place + 7 <= len(content):  # LevelDB's log format, in blocks of 32 KiB
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 4):  # the whole record, or its last part
            continue
        parsed, record = records.Record.FromString(record), b""
        if parsed.WhichOneof("record_type") == "history":
            items = parsed.history.item
            yield {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["transformers_trainer.py", "trl_sft.py"])
def test_an_unchanged_script_reports_the_metrics(tmp_path: Path, script: str) -> None:
    for package in ("datasets", "tensorboard", "trl", "wandb"):
        pytest.importorskip(package)
    launch_file = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    launch_file |= {"num_processes": 1, "use_cpu": True, "ssd_offload_config": OFFLOAD_ALL}
    (tmp_path / "offload.yaml").write_text(yaml.safe_dump(launch_file))
    words = ["launch", "--config", "offload.yaml", str(SCRIPTS / script)]
    words += ["--report_to", "tensorboard", "wandb"]
    variables = {
        "SSD_OFFLOAD_METRICS_EVERY": "3",
        "TENSORBOARD_LOGGING_DIR": str(tmp_path / "board"),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
    }
    printed = succeeded(
        python("-c", LAUNCHER, *words, home=tmp_path, variables=variables, timeout=280)
    )
    assert WRITTEN not in printed

    scalars = tensorboard_scalars(tmp_path / "board")
    steps = [step for step, _ in scalars["train/loss"]]
    assert steps == [*range(1, 9)]
    ours = {name for name in scalars if "offload/" in name}
    assert ours >= RATES
    assert {name.split("/")[1] for name in ours} >= GROUPS
    for name in ours:
        assert name.startswith("offload/")
        assert [step for step, _ in scalars[name]] == [1, 4, 7, 8], name
        assert all(math.isfinite(value) for _, value in scalars[name])
    assert scalars[WRITTEN][0][1] < scalars[WRITTEN][-1][1]

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in wandb_rows(file) if WRITTEN in row]
    assert [row["train/global_step"] for row in rows] == [1, 4, 7, 8]
    assert all("train/loss" in row for row in rows[:-1])
    assert {name for name in rows[0] if "offload/" in name} == ours


# ---------------------------------------------------------------------- who sees the metrics
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
