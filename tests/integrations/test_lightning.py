"""`Trainer(strategy="ssd_offload")` against the same Trainer without, to the last bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offload_strategy import ConfigError, OffloadError
from tests.integrations.lightning_runs import (
    Run,
    assert_equal,
    batches,
    fit,
    in_both_installs,
    make_module,
    make_trainer,
    strategy_class,
    with_and_without,
)
from tests.training import moved


def both(pl: Any, root: Path, *, module: dict[str, Any] | None = None, **options: Any) -> Run:
    """Train with and without offload, check that they agree, and return the former."""
    return with_and_without(
        lambda strategy: fit(pl, root, strategy, make_module(pl, **(module or {})), **options)
    )


# ---------------------------------------------------------------------- numbers


@in_both_installs
def test_accumulation_clipping_a_scheduler_and_validation_are_identical(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]], recwarn: pytest.WarningsRecorder
) -> None:
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "max_steps": 9}
    run = both(pl, tmp_path, module={"scheduler": True}, validate=True, **options)
    # Ten batches an epoch: two groups of four, and one of two, after which Lightning steps as well.
    group = [(0, False), (1, False), (2, False), (3, True)]
    # Before `attach` it is said that gradients accumulate.
    assert hints[:31] == [(0, False), *3 * [*group, *group, (0, False), (1, True)]]
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]
    assert len(run.validation_losses) > 6
    before = moved(run.engine)
    assert min(before, moved(run.engine, "optimizer")) > 0
    run.trainer.validate(run.module, batches(2), verbose=False)
    assert moved(run.engine) == before


# ---------------------------------------------------------------------- what is trained


def test_layers_that_are_thawed_later_are_identical(pl: Any, tmp_path: Path) -> None:
    class Thaw(pl.callbacks.BaseFinetuning):  # type: ignore[name-defined,misc]
        """Adds the first layer's parameters to the optimizer after an epoch."""

        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)

    options = {"max_steps": -1, "max_epochs": 3, "callbacks": [Thaw()]}
    both(pl, tmp_path, module={"optimizer": adamw}, **options)


def test_a_step_that_was_replaced_is_the_one_that_runs(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def twice(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=lr)
        step = optimizer.step
        optimizer.step = lambda closure=None: (step(closure), step())[0]  # type: ignore[method-assign]
        return optimizer

    both(pl, tmp_path, module={"optimizer": twice}, max_steps=3)
    assert caplog.text.count("has a step() that was replaced") == 1

    step = mock.MagicMock()  # which has every attribute but those like __wrapped__
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    module = make_module(pl, optimizer=torch.optim.SGD, manual=True)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    run = fit(pl, tmp_path, "ssd_offload", module, max_steps=-1, max_epochs=1)
    assert step.call_count == 10  # every second batch, by two optimizers
    assert_equal(run.parameters, before)


def test_a_model_with_nothing_to_optimize_trains_on_without_offloaded_states(
    pl: Any, tmp_path: Path
) -> None:
    module = make_module(pl)
    module.configure_optimizers = lambda: None
    run = fit(pl, tmp_path, "ssd_offload", module, max_steps=3)
    assert len(run.losses) == 3


# ---------------------------------------------------------------------- devices and families


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_one_device_is_a_single_device_without_a_process_group(
    pl: Any, tmp_path: Path, accelerator: str
) -> None:
    trainer = fit(pl, tmp_path, "ssd_offload", accelerator=accelerator, max_steps=1).trainer
    assert isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy)
    assert trainer.strategy.root_device.type in ("cpu", "cuda", "mps")
    assert trainer.world_size == 1
    assert not torch.distributed.is_initialized()
    assert type(trainer.train_dataloader.sampler).__name__ == "SequentialSampler"


@in_both_installs
@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2)])
def test_several_devices_are_data_parallel_and_stream_no_weights(
    pl: Any, family: str, tmp_path: Path, devices: int, nodes: int
) -> None:
    options = {"devices": devices, "num_nodes": nodes}
    config = {"tiers": [{"name": "host", "kind": "dram", "capacity": "1GiB"}]}
    given = strategy_class(family)(config, ddp={"find_unused_parameters": True})
    for strategy in ("ssd_offload", given):
        made = make_trainer(pl, tmp_path, strategy, **options).strategy
        assert isinstance(made, pl.strategies.DDPStrategy)
        assert (made.num_processes, made.num_nodes) == (devices, nodes)
    assert made is given
    assert made.config.tiers[0].capacity == 1 << 30
    assert made._ddp_kwargs == {"find_unused_parameters": True}
    given = strategy_class(family)({"parameters": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"parameters\.enabled streams.*devices=1"):
        make_trainer(pl, tmp_path, given, **options)
    with pytest.raises(ConfigError, match="Use strategy='ssd_offload_fsdp'"):
        type(made)({"parameters": {"enabled": True}})


@in_both_installs
def test_the_strategy_of_the_other_install_is_met_with_help(
    pl: Any, family: str, tmp_path: Path
) -> None:
    other = "pytorch_lightning" if family == "lightning.pytorch" else "lightning.pytorch"
    pytest.importorskip(other)
    right = f"{strategy_class(family).__module__}.SSDOffloadStrategy"
    with pytest.raises(ValueError, match=right.replace(".", r"\.")):
        make_trainer(pl, tmp_path, strategy_class(other)())


# ---------------------------------------------------------------------- bad input


def test_a_misspelt_key_is_refused_when_the_strategy_or_the_trainer_is_made(
    pl: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        strategy_class(family)(config={"optimzer": {}})
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"activations": {"min_sise": 1}}')
    with pytest.raises(ConfigError, match=r"did you mean 'activations\.min_size'"):
        make_trainer(pl, tmp_path, "ssd_offload")


@pytest.mark.parametrize("wrong", ["missing", "file", "LBFGS"])
def test_what_cannot_work_is_refused_before_the_first_step(
    pl: Any, family: str, tmp_path: Path, wrong: str
) -> None:
    (tmp_path / "file").write_text("")
    module, config = make_module(pl), None
    if wrong == "LBFGS":
        module.make_optimizer = torch.optim.LBFGS
        config = {"optimizer": {"enabled": True}}
    else:
        config = {"tiers": [{"name": "there", "kind": "ssd", "path": str(tmp_path / wrong)}]}
    with pytest.raises(OffloadError, match=wrong):
        fit(pl, tmp_path, strategy_class(family)(config), module)
    assert module.losses == []


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_optimizer_with_a_closure_trains_with_its_states_in_memory(
    pl: Any, tmp_path: Path, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_steps": 4, "accumulate_grad_batches": accumulate}
    both(pl, tmp_path, module={"optimizer": torch.optim.LBFGS}, **options)
    assert caplog.text.count("Its states stay in memory") == 1


def test_a_module_is_copied_and_pickled_in_the_middle_of_fit(pl: Any, tmp_path: Path) -> None:
    """As averaging callbacks and loggers do."""
    copies: list[Any] = []

    def take_copies(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            # The module's class is local to this test, and cannot be pickled.
            copies[:] = copy.deepcopy(module), pickle.loads(pickle.dumps(module.net))
            copies.append([p.detach().clone() for p in module.parameters()])

    callback = pl.callbacks.LambdaCallback(on_train_batch_end=take_copies)
    run = both(pl, tmp_path, callbacks=[callback], max_steps=10)
    deep, pickled, at = copies
    assert_equal(list(deep.parameters()), at)
    assert_equal(list(pickled.parameters()), at)

    # The copy trains by itself and moves nothing.
    before = moved(run.engine)
    deep.train()
    deep.loss(next(iter(batches()))).backward()
    assert moved(run.engine) == before


def test_a_strategy_is_copied_and_pickled(pl: Any, family: str, tmp_path: Path) -> None:
    strategy = fit(pl, tmp_path, strategy_class(family)(), max_steps=2).trainer.strategy
    strategy.connect(None)
    for clone in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(clone) is strategy_class(family)
        assert clone.config == strategy.config
        assert clone.offload_engine is None
