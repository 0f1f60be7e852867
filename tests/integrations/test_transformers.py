"""Transformers' `Trainer`, which prepares through Accelerate, against itself without offload.

What its loggers get is in test_unmodified_scripts.py, and here who of its callbacks sees that.
"""

import json
import os
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import MLflowCallback
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.integrations.lightning_runs import assert_equal, parameters_of


def tokens(rows):
    drawn = torch.randint(0, 64, (rows, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in drawn]


def make_trainer(root, **options):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    options = {"gradient_accumulation_steps": 3, **options}
    arguments = TrainingArguments(
        str(root),
        use_cpu=True,
        per_device_train_batch_size=4,  # 13 batches an epoch: the last group has one
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    model = GPT2LMHeadModel(GPT2Config(**shape, **quiet))
    return Trainer(model, arguments, train_dataset=tokens(50), eval_dataset=tokens(8))


def numbers(trainer):
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, parameters_of(trainer.model)


def train_twice_and_resume(root):
    """Evaluate, train, train again; then save half-way and resume in another Trainer."""
    found = []
    trainer = make_trainer(root, max_steps=7)
    for _ in range(2):
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.train()
        losses, weights = numbers(trainer)
        found.append(([evaluated, *losses], weights))

    options = {"gradient_checkpointing": True, "max_steps": 6}
    saving = make_trainer(root, **options)
    saving.args.save_strategy = "steps"
    saving.args.save_steps = 4
    saving.train()
    resumed = make_trainer(root, **options)
    resumed.train(resume_from_checkpoint=str(root / "checkpoint-4"))
    return [*found, numbers(saving), numbers(resumed)]


def train_compiled(root):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    trainer = make_trainer(root, gradient_accumulation_steps=1, **options)
    trainer.train()
    return [numbers(trainer)]


def shrink_and_train(root):
    """Run out of memory in the third step, and let the Trainer start over with smaller batches."""
    trainer = make_trainer(root, max_steps=5, auto_find_batch_size=True)
    sizes = []

    def runs_out(module, args, kwargs):
        sizes.append(len(kwargs["input_ids"]))
        if len(sizes) == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")  # what the Trainer looks for

    trainer.model.register_forward_pre_hook(runs_out, with_kwargs=True)
    trainer.train()
    assert sizes[-1] < sizes[0] == 4
    active = bool(os.environ.get("ACCELERATE_USE_SSD_OFFLOAD"))
    assert isinstance(trainer.optimizer.optimizer, OffloadedOptimizer) is active
    return [numbers(trainer)]


@pytest.mark.parametrize("train", [train_twice_and_resume, train_compiled, shrink_and_train])
def test_training_is_identical(tmp_path, monkeypatch, train):
    plain = train(tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    for ours, theirs in zip(train(tmp_path / "offloaded"), plain, strict=True):
        assert ours[0] == theirs[0]
        assert_equal(ours[1], theirs[1])


@pytest.mark.parametrize("clips_at", [1.0, 0.0])  # at 0.0 the Trainer logs the norm nevertheless
def test_eager_updates_are_refused_before_a_weight_changes(tmp_path, monkeypatch, clips_at):
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", str(tmp_path / "eager.yaml"))
    (tmp_path / "eager.yaml").write_text("optimizer: {overlap: eager}\n")
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=1, max_steps=2)
    trainer.args.max_grad_norm = clips_at
    before = parameters_of(trainer.model)
    with pytest.raises(ConfigError, match=r"the Trainer of Transformers.*overlap: commit"):
        trainer.train()
    assert_equal(parameters_of(trainer.model), before)


WRITTEN = "offload/optimizer/written_bytes"


def mlflow_reporter():
    """The callback of Transformers, over an MLflow that only notes its calls."""
    callback = MLflowCallback.__new__(MLflowCallback)
    callback._initialized, callback._async_log, callback._auto_end_run = True, False, False
    callback._ml_flow = mock.Mock()
    return callback


@pytest.mark.parametrize(
    ("before_the_others", "active", "every"),
    [(True, "1", 2), (False, "1", 2), (False, "1", 0), (False, "0", 1)],
)
def test_only_reporting_callbacks_see_the_metrics_and_each_step_once(
    tmp_path, monkeypatch, capsys, before_the_others, active, every
):
    plain = make_trainer(tmp_path, max_steps=5)
    plain.train()
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", active)
    monkeypatch.setenv("SSD_OFFLOAD_METRICS_EVERY", str(every))
    capsys.readouterr()
    trainer = make_trainer(tmp_path, max_steps=5)
    reporter, own, seen = mlflow_reporter(), TrainerCallback(), []
    own.on_log = lambda *_, logs, **__: seen.append(dict(logs))
    place = 0 if before_the_others else len(trainer.callback_handler.callbacks)
    trainer.callback_handler.callbacks[place:place] = [reporter, own]
    trainer.train()
    calls = [call.kwargs for call in reporter._ml_flow.log_metrics.call_args_list]
    assert len(calls) == 5 + 1  # one for each step, and the summary
    assert all(call["metrics"].keys() & {"loss", "train_loss"} for call in calls)
    reported = [call["step"] for call in calls if WRITTEN in call["metrics"]]
    assert reported == ([1, 3, 5] if active == "1" and every == 2 else [])
    ours = [key for call in calls for key in call["metrics"] if key.startswith("offload/")]
    assert bool(ours) is bool(reported)
    # All else is as without offload.
    assert any(isinstance(one, PrinterCallback) for one in trainer.callback_handler.callbacks)
    assert "'loss'" in (printed := capsys.readouterr().out)
    assert "offload/" not in printed
    assert not any(key.startswith("offload/") for logs in seen for key in logs)
    json.dumps(trainer.state.log_history)
    keys = [[sorted(row) for row in one.state.log_history] for one in (trainer, plain)]
    assert keys[0] == keys[1]
    assert numbers(trainer)[0] == numbers(plain)[0]


def test_checkpoints_that_offload_are_refused(tmp_path, monkeypatch):
    twice = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    with pytest.raises(ConfigError, match=r"'transformer'.* set activations: \{enabled: false\}"):
        make_trainer(tmp_path, max_steps=1, **twice).train()
    # Swapping optimizer states is another matter.
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"activations": {"enabled": false}}')
    model = make_trainer(tmp_path, max_steps=1).model
    model.activation_checkpointing_enable({"offload": True})
    OffloadEngine().attach(model)


def test_the_activation_offload_of_trl_is_refused(monkeypatch):
    offloading = pytest.importorskip("trl.models.activation_offloading")
    # Without an accelerator TRL cannot even begin; the CPU is one as far as it looks here.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    context = offloading.OffloadActivations(use_pin_memory=False, use_streams=False)
    model = nn.Linear(8, 8)
    with OffloadEngine() as engine:
        engine.attach(model)
        with context, pytest.raises(ConfigError, match="activation_offloading=True"):
            model(torch.ones(2, 8))
        model(torch.ones(2, 8)).sum().backward()
    with OffloadEngine({"activations": {"enabled": False}}) as engine:
        engine.attach(model)
        with context:
            model(torch.ones(2, 8)).sum()
