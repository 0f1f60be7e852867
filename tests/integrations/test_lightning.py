"""`Trainer(strategy="ssd_offload")` against the same Trainer without, to the last bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import ConfigError, OffloadError
from tests.integrations.lightning_runs import (
    Run,
    assert_equal,
    assert_same,
    batches,
    fit,
    make_module,
    make_trainer,
    strategy_class,
)
from tests.integrations.support import python, succeeded


def both(pl: Any, root: Path, *, module: dict[str, Any] | None = None, **options: Any) -> Run:
    """Train with and without offload, check that they agree, and return the former."""
    plain = fit(pl, root, "auto", make_module(pl, **(module or {})), **options)
    offloaded = fit(pl, root, "ssd_offload", make_module(pl, **(module or {})), **options)
    assert_same(offloaded, plain)
    return offloaded


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The hints that engines are given."""
    from offload_strategy.engine.offload_engine import OffloadEngine

    given: list[tuple[int, bool]] = []
    original = OffloadEngine.microbatch

    def microbatch(self: OffloadEngine, index: int, last: bool) -> None:
        given.append((index, last))
        original(self, index, last=last)

    monkeypatch.setattr(OffloadEngine, "microbatch", microbatch)
    return given


# ---------------------------------------------------------------------- numbers


def test_thirty_steps_are_identical(pl: Any, tmp_path: Path) -> None:
    run = both(pl, tmp_path)
    assert len(run.losses) == 30
    metrics = run.engine.metrics()
    assert metrics["offload/activations/written_bytes"] > 0
    assert metrics["offload/optimizer/written_bytes"] > 0


def test_an_instance_trains_as_the_name_does(pl: Any, family: str, tmp_path: Path) -> None:
    named = fit(pl, tmp_path, "ssd_offload", max_steps=5)
    config = {"activations": {"min_size": "1KiB"}, "optimizer": {"enabled": False}}
    given = fit(pl, tmp_path, strategy_class(family)(config=config), max_steps=5)
    assert_same(given, named)
    assert given.engine.config.activations.min_size == 1024
    assert given.engine.metrics()["offload/optimizer/written_bytes"] == 0


def test_accumulation_clipping_and_a_scheduler_are_identical(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]], recwarn: pytest.WarningsRecorder
) -> None:
    both(
        pl,
        tmp_path,
        module={"scheduler": True},
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        max_steps=9,
    )
    # Ten batches an epoch: two groups of four, and one of two, after which Lightning steps as well.
    group = [(0, False), (1, False), (2, False), (3, True)]
    assert hints[:30] == 3 * [*group, *group, (0, False), (1, True)]
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_manual_optimization_with_two_optimizers_is_identical_and_has_no_hints(
    pl: Any, tmp_path: Path, hints: list[tuple[int, bool]]
) -> None:
    run = both(pl, tmp_path, module={"manual": True}, max_steps=-1, max_epochs=2)
    assert len(run.losses) == 20
    assert hints == [(0, False)]  # at the end of fit: no step follows


def test_validation_is_identical_and_moves_nothing(pl: Any, tmp_path: Path) -> None:
    run = both(pl, tmp_path, validate=True, val_check_interval=5)
    assert len(run.module.validation_losses) > 6
    before = run.engine.metrics()["offload/activations/written_bytes"]
    run.trainer.validate(run.module, batches(2), verbose=False)
    assert run.engine.metrics()["offload/activations/written_bytes"] == before


# ---------------------------------------------------------------------- checkpoints


def resume(pl: Any, root: Path, first: str, second: str) -> tuple[Run, Run]:
    """Train ten steps, save, and train ten more in another Trainer."""
    module = {"scheduler": True}
    begun = fit(pl, root, first, make_module(pl, **module), max_steps=10)
    begun.trainer.save_checkpoint(root / "half.ckpt")
    ended = fit(
        pl,
        root,
        second,
        make_module(pl, **module),
        max_steps=20,
        ckpt_path=root / "half.ckpt",
    )
    return begun, ended


@pytest.mark.parametrize(
    ("first", "second"),
    [("auto", "ssd_offload"), ("ssd_offload", "auto"), ("ssd_offload", "ssd_offload")],
)
def test_training_resumes_from_a_checkpoint_with_and_without_offload(
    pl: Any, tmp_path: Path, first: str, second: str
) -> None:
    plain = resume(pl, tmp_path, "auto", "auto")
    offloaded = resume(pl, tmp_path, first, second)
    assert len(plain[1].losses) == 10
    for run, reference in zip(offloaded, plain, strict=True):
        assert_same(run, reference)


def test_a_checkpoint_after_fit_has_the_states_that_plain_training_has(
    pl: Any, tmp_path: Path
) -> None:
    states = []
    for strategy in ("auto", "ssd_offload"):
        run = fit(pl, tmp_path, strategy, max_steps=5)
        run.trainer.save_checkpoint(tmp_path / "end.ckpt")
        checkpoint = torch.load(tmp_path / "end.ckpt", weights_only=True)
        states.append(checkpoint["optimizer_states"][0])
    plain, offloaded = states
    assert offloaded["param_groups"] == plain["param_groups"]
    assert offloaded["state"].keys() == plain["state"].keys()
    for index, state in plain["state"].items():
        for key, value in state.items():
            assert torch.equal(offloaded["state"][index][key], value), (index, key)


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

    runs = []
    for strategy in ("auto", "ssd_offload"):
        module = make_module(pl, optimizer=adamw)
        options = {"max_steps": -1, "max_epochs": 3, "callbacks": [Thaw()]}
        runs.append(fit(pl, tmp_path, strategy, module, **options))
    assert_same(runs[1], runs[0])


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
    run = fit(pl, tmp_path, "ssd_offload", accelerator=accelerator, max_steps=1)
    strategy = run.trainer.strategy
    assert isinstance(strategy, pl.strategies.SingleDeviceStrategy)
    assert strategy.root_device.type in ("cpu", "cuda", "mps")
    assert run.trainer.world_size == 1
    assert not torch.distributed.is_initialized()
    assert type(run.trainer.train_dataloader.sampler).__name__ == "SequentialSampler"


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_are_data_parallel(
    pl: Any, family: str, tmp_path: Path, options: dict[str, int]
) -> None:
    config = {"tiers": [{"name": "host", "kind": "dram", "capacity": "1GiB"}]}
    given = strategy_class(family)(config, ddp={"find_unused_parameters": True})
    for strategy in ("ssd_offload", given):
        made = make_trainer(pl, tmp_path, strategy, **options).strategy
        assert isinstance(made, pl.strategies.DDPStrategy)
        assert (made.num_processes, made.num_nodes) == (
            options["devices"],
            options.get("num_nodes", 1),
        )
    assert made is given
    assert made.config.tiers[0].capacity == 1 << 30
    assert made._ddp_kwargs == {"find_unused_parameters": True}


def test_weights_are_streamed_on_one_device(pl: Any, family: str, tmp_path: Path) -> None:
    given = strategy_class(family)({"parameters": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"parameters\.enabled streams.*devices=1"):
        make_trainer(pl, tmp_path, given, devices=2)


def test_the_strategy_of_the_other_install_is_met_with_help(
    pl: Any, family: str, tmp_path: Path
) -> None:
    other = "pytorch_lightning" if family == "lightning.pytorch" else "lightning.pytorch"
    pytest.importorskip(other)
    right = f"{strategy_class(family).__module__}.SSDOffloadStrategy"
    with pytest.raises(ValueError, match=right.replace(".", r"\.")):
        make_trainer(pl, tmp_path, strategy_class(other)())


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_public_name_is_the_class_of_the_install_that_the_script_uses(
    tmp_path: Path, name: str
) -> None:
    code = f"""
import {name} as pl
from offload_strategy import SSDOffloadStrategy
from offload_strategy.integrations.lightning import SSDOffloadStrategy as same
trainer = pl.Trainer(strategy=SSDOffloadStrategy(), logger=False)
print(trainer.strategy.family, same is SSDOffloadStrategy)
import sys
print([other for other in ("lightning.pytorch", "pytorch_lightning") if other in sys.modules])
"""
    pytest.importorskip(name)
    lines = succeeded(python("-c", code, home=tmp_path)).splitlines()
    assert lines[-2:] == [f"{name} True", f"['{name}']"]


# ---------------------------------------------------------------------- bad input


def test_a_misspelt_key_is_refused_when_the_strategy_is_made(family: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        strategy_class(family)(config={"optimzer": {}})


def test_a_misspelt_default_config_is_refused_when_the_trainer_is_made(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    else:
        config = {"tiers": [{"name": "there", "kind": "ssd", "path": str(tmp_path / wrong)}]}
    with pytest.raises(OffloadError, match=wrong):
        fit(pl, tmp_path, strategy_class(family)(config), module)
    assert module.losses == []


# ---------------------------------------------------------------------- copies


class CopyInTheMiddle:
    """Does to the module, in the middle of `fit`, what averaging callbacks and loggers do."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step != 5:
            return
        self.deep = copy.deepcopy(module)
        with_own_class = module.net  # the module's class is local to this test
        self.pickled = pickle.loads(pickle.dumps(with_own_class))
        self.at = [p.detach().clone() for p in module.parameters()]


def test_a_module_is_copied_and_pickled_in_the_middle_of_fit(pl: Any, tmp_path: Path) -> None:
    callback = type("Copies", (CopyInTheMiddle, pl.Callback), {})()
    run = fit(pl, tmp_path, "ssd_offload", callbacks=[callback], max_steps=10)
    assert_equal(list(callback.deep.parameters()), callback.at)
    assert_equal(list(callback.pickled.parameters()), callback.at)

    # The copy trains by itself and moves nothing.
    before = run.engine.metrics()["offload/activations/written_bytes"]
    callback.deep.train()
    callback.deep.loss(next(iter(batches()))).backward()
    assert run.engine.metrics()["offload/activations/written_bytes"] == before

    plain = fit(pl, tmp_path, "auto", max_steps=10)
    assert_same(run, plain)


def test_a_strategy_is_copied_and_pickled(pl: Any, family: str, tmp_path: Path) -> None:
    run = fit(pl, tmp_path, strategy_class(family)(), max_steps=2)
    run.trainer.strategy.connect(None)
    for clone in (
        copy.deepcopy(run.trainer.strategy),
        pickle.loads(pickle.dumps(run.trainer.strategy)),
    ):
        assert type(clone) is strategy_class(family)
        assert clone.config == run.trainer.strategy.config
        assert clone.offload_engine is None
