"""`Trainer(strategy="ssd_offload")` against the same Trainer without, to the last bit.

That training from the command line gives the same numbers is in `test_unmodified_scripts.py`.
"""

import copy
import importlib
import pickle
import re
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from torch import nn

from offload_strategy import ConfigError
from tests.integrations import lightning_runs
from tests.integrations.lightning_runs import batches, fit, make_module, strategy_class
from tests.integrations.support import STREAMED
from tests.training import moved


def both(pl, root, *, module=None, **options):
    return lightning_runs.with_and_without(
        lambda strategy: fit(pl, root, strategy, make_module(pl, **(module or {})), **options)
    )


@lightning_runs.in_both_installs
def test_accumulation_clipping_schedules_and_validation_are_identical(pl, tmp_path, hints, recwarn):
    options = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "max_steps": 9}
    run = both(pl, tmp_path, module={"scheduler": True}, validate=True, **options)
    # Ten batches an epoch: two groups of four, and one of two, after which Lightning steps as well.
    group = [False, False, False, True]
    # Before `attach` it is said that gradients accumulate.
    assert hints[:31] == [False, *3 * [*group, *group, False, True]]
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]
    assert len(run.validation_losses) > 6
    before = moved(run.engine)
    assert min(before, moved(run.engine, "optimizer")) > 0
    run.trainer.validate(run.module, batches(2), verbose=False)
    assert moved(run.engine) == before


def test_layers_that_are_thawed_later_are_identical(pl, tmp_path):
    class Thaw(pl.callbacks.BaseFinetuning):
        """Adds the first layer's parameters to the optimizer after an epoch."""

        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    def adamw(parameters, lr):
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)

    options = {"max_steps": -1, "max_epochs": 3, "callbacks": [Thaw()]}
    both(pl, tmp_path, module={"optimizer": adamw}, **options)


def test_a_step_that_was_replaced_is_the_one_that_runs(pl, tmp_path, monkeypatch, caplog):
    def twice(parameters, lr):
        optimizer = torch.optim.SGD(parameters, lr=lr)
        step = optimizer.step
        optimizer.step = lambda closure=None: (step(closure), step())[0]
        return optimizer

    both(pl, tmp_path, module={"optimizer": twice}, max_steps=3)
    assert caplog.text.count("has a step() that was replaced") == 1

    step = mock.MagicMock()  # which has every attribute but those like __wrapped__
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    module = make_module(pl, optimizer=torch.optim.SGD, manual=True)
    before = lightning_runs.parameters_of(module)
    run = fit(pl, tmp_path, "ssd_offload", module, max_steps=-1, max_epochs=1)
    assert step.call_count == 10  # every second batch, by two optimizers
    lightning_runs.assert_equal(run.parameters, before)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_optimizer_with_a_closure_has_its_states_in_memory(pl, tmp_path, accumulate, caplog):
    options = {"max_steps": 4, "accumulate_grad_batches": accumulate}
    both(pl, tmp_path, module={"optimizer": torch.optim.LBFGS}, **options)
    assert caplog.text.count("Its states stay in memory") == 1


def test_a_model_with_nothing_to_optimize_trains_on(pl, tmp_path):
    module = make_module(pl)
    module.configure_optimizers = lambda: None
    assert len(fit(pl, tmp_path, "ssd_offload", module, max_steps=3).losses) == 3


def test_copies_of_module_and_strategy_have_no_engine(pl, family, tmp_path):
    """As averaging callbacks and loggers make them in the middle of `fit`."""
    copies = []

    def take_copies(trainer, module, *_):
        if trainer.global_step == 5:
            # The module's class is local to this test, and cannot be pickled.
            copies[:] = copy.deepcopy(module), pickle.loads(pickle.dumps(module.net))
            copies.append(lightning_runs.parameters_of(module))

    callback = pl.callbacks.LambdaCallback(on_train_batch_end=take_copies)
    run = both(pl, tmp_path, callbacks=[callback], max_steps=10)
    deep, pickled, at = copies
    lightning_runs.assert_equal(lightning_runs.parameters_of(deep), at)
    lightning_runs.assert_equal(lightning_runs.parameters_of(pickled), at)

    # The copy trains by itself and moves nothing.
    before = moved(run.engine)
    deep.train()
    deep.loss(next(iter(batches()))).backward()
    assert moved(run.engine) == before

    strategy = run.trainer.strategy
    strategy.connect(None)
    for clone in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(clone) is strategy_class(family)
        assert clone.config == strategy.config
        assert clone.offload_engine is None


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_one_device_is_a_single_device(pl, tmp_path, accelerator):
    trainer = fit(pl, tmp_path, "ssd_offload", accelerator=accelerator, max_steps=1).trainer
    assert isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy)
    assert trainer.strategy.root_device.type in ("cpu", "cuda", "mps")
    assert not torch.distributed.is_initialized()
    assert type(trainer.train_dataloader.sampler).__name__ == "SequentialSampler"


@lightning_runs.in_both_installs
@pytest.mark.parametrize(("devices", "nodes"), [(2, 1), (1, 2)])
def test_several_devices_are_data_parallel(pl, family, tmp_path, devices, nodes):
    options = {"devices": devices, "num_nodes": nodes}
    ours = strategy_class(family)
    config = {"tiers": [{"name": "host", "kind": "dram", "capacity": "1GiB"}]}
    given = ours(config, ddp={"find_unused_parameters": True})
    for strategy in ("ssd_offload", ours(STREAMED), given):
        made = lightning_runs.make_trainer(pl, tmp_path, strategy, **options).strategy
        assert isinstance(made, pl.strategies.DDPStrategy)
        assert (made.num_processes, made.num_nodes) == (devices, nodes)
    assert made is given
    assert made.config.tiers[0].capacity == 1 << 30
    assert made._ddp_kwargs == {"find_unused_parameters": True}


@lightning_runs.in_both_installs
def test_the_other_installs_strategy_is_met_with_help(pl, family, tmp_path):
    other = "pytorch_lightning" if family == "lightning.pytorch" else "lightning.pytorch"
    pytest.importorskip(other)
    with pytest.raises(ValueError, match=re.escape(class_path(family))):
        lightning_runs.make_trainer(pl, tmp_path, strategy_class(other)())


# ---------------------------------------------------------------------- streamed weights
def streaming(overlap):
    return strategy_class("lightning.pytorch")({**STREAMED, "optimizer": {"overlap": overlap}})


@pytest.mark.parametrize(("overlap", "clip"), [("commit", 0.5), ("eager", None)])
def test_streamed_weights_accumulate_clip_validate_and_resume_the_same(pl, tmp_path, overlap, clip):
    def run(name):
        first, second = (name if name == "auto" else streaming(overlap) for _ in range(2))
        folder = tmp_path / name
        saving = pl.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)
        options = {"gradient_clip_val": clip, "enable_checkpointing": True, "validate": True}
        options["accumulate_grad_batches"] = 2
        fit(pl, folder, first, max_steps=5, callbacks=[saving], **options)
        return fit(pl, folder, second, ckpt_path=folder / "last.ckpt", max_steps=10, **options)

    assert moved(lightning_runs.with_and_without(run).engine, "parameters", "read") > 0


def test_a_model_that_does_not_fit_is_made_in_configure_model(pl, tmp_path):
    away = []

    class Late(type(make_module(pl))):
        def __init__(self):
            super().__init__()
            self.net = nn.Identity()

        def configure_model(self):
            if isinstance(self.net, nn.Identity):
                torch.manual_seed(5)
                self.net = lightning_runs.tiny_model()

        def on_fit_start(self):
            away.append(sum(type(p) is not nn.Parameter for p in self.parameters()))

    plain = fit(pl, tmp_path, module=Late(), max_steps=6)
    streamed = fit(pl, tmp_path, streaming("eager"), Late(), max_steps=6)
    assert away[0] == 0 < away[1]
    lightning_runs.assert_same(streamed, plain)
    again = fit(pl, tmp_path, streaming("eager"), streamed.module, max_steps=6)
    assert len(again.losses) == 12
    again.trainer.strategy._close_engine()


def test_an_empty_module_is_filled_and_its_engine_closes(pl, tmp_path):
    for empty in (True, False):
        strategy = streaming("eager")
        trainer = lightning_runs.make_trainer(pl, tmp_path, strategy, max_steps=3)
        with trainer.init_module(empty_init=empty):
            module = make_module(pl)
        assert all(parameter.is_meta for parameter in module.parameters()) is empty
        assert not any(each.name.startswith("ssd-offload") for each in threading.enumerate())
        if empty:
            trainer.fit(module, batches())
            assert len(module.losses) == 3
        engine = strategy.offload_engine
        del trainer, strategy
        engine.close()
        for parameter in module.parameters():
            assert type(parameter) is nn.Parameter
            assert torch.isfinite(parameter).all()


# ---------------------------------------------------------------------- the command line
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "unmodified" / "lightning_cli.yaml"
TIER = {"name": "host", "kind": "dram", "capacity": "1MiB"}
OPTIONS = {"tiers": [TIER], "activations": {"min_size": "2KiB"}}


def class_path(family):
    return f"{strategy_class(family).__module__}.SSDOffloadStrategy"


def strategy_of_cli(pl, family, *arguments):
    """Parse a command line, make the Trainer that it asks for, and return its strategy."""
    pytest.importorskip("jsonargparse")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    cli = importlib.import_module(f"{family}.cli").LightningCLI(
        type(make_module(pl)),
        args=list(arguments),
        run=False,
        save_config_callback=None,
        trainer_defaults={**quiet, "accelerator": "cpu"},
    )
    return cli.trainer.strategy


@lightning_runs.in_both_installs
def test_flags_choose_the_strategy_and_its_options_as_help_explains(
    pl, family, monkeypatch, capsys
):
    strategy = strategy_of_cli(pl, family, "--trainer.strategy=ssd_offload")
    assert isinstance(strategy, strategy_class(family))
    assert strategy.config.activations.min_size == 1024  # of $SSD_OFFLOAD_CONFIG

    by_class = f"--trainer.strategy={class_path(family)}"
    preset = strategy_of_cli(pl, family, by_class, "--trainer.strategy.config=optimizer")
    assert preset.config.optimizer.enabled
    assert not preset.config.activations.enabled

    misspelt = "--trainer.strategy.config={activations: {minsize: 2KiB}}"
    with pytest.raises(ValueError, match=r"unknown key; did you mean 'activations\.min_size'\?"):
        strategy_of_cli(pl, family, by_class, misspelt)
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"activations": {"min_sise": 1}}')
    with pytest.raises(ConfigError, match=r"did you mean 'activations\.min_size'"):
        strategy_of_cli(pl, family, "--trainer.strategy=ssd_offload")

    with pytest.raises(SystemExit):
        strategy_of_cli(pl, family, f"--trainer.strategy.help={class_path(family)}")
    printed = " ".join(capsys.readouterr().out.split())
    assert "Trains with activations and optimizer states on host memory and SSDs" in printed
    assert "--trainer.strategy.config CONFIG Sections tiers, activations, optimizer" in printed
    assert "ssd-offload config schema" in printed


def test_options_may_come_from_a_file_and_survive_being_written(pl, family, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    strategy = {"class_path": class_path(family), "init_args": {"config": OPTIONS}}
    file.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    given = strategy_of_cli(pl, family, f"--config={file}").config
    assert (given.tiers[0].capacity, given.activations.min_size) == (1024 * 1024, 2048)

    with pytest.raises(SystemExit):
        strategy_of_cli(pl, family, f"--config={file}", "--print_config")
    file.write_text(capsys.readouterr().out)
    assert strategy_of_cli(pl, family, f"--config={file}").config == given
    # Where both installs are imported, as here, the short path of the example means the first one.
    example = strategy_of_cli(pl, family, f"--config={EXAMPLE}").config
    assert example.activations.min_size == 256 * 1024
