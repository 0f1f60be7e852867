"""The engine inside `Accelerator.prepare`, against the same loop without, to the last bit."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, checkpointing
from accelerate.utils import GradScalerKwargs
from torch import nn

import offload_strategy.checkpoints
from offload_strategy import ConfigError, OffloadEngine, OffloadError, SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.distributed.data_parallel_runs import same
from tests.integrations.accelerate_runs import _fresh_accelerate, prepare
from tests.integrations.lightning_runs import assert_equal, assert_same, tiny_model
from tests.integrations.support import tensorboard_scalars
from tests.training import moved

__all__ = ["_fresh_accelerate"]

EAGER: dict[str, Any] = {"optimizer": {"overlap": "eager"}}


def offloading(config: Any = None, **options: Any) -> Accelerator:
    """An `Accelerator` with the plugin."""
    return Accelerator(cpu=True, kwargs_handlers=[SSDOffloadPlugin(config, **options)])


# ---------------------------------------------------------------------- numbers


def test_accumulation_clipping_and_a_scheduler_are_identical(
    hints: list[tuple[int, bool]],
) -> None:
    plain = prepare(gradient_accumulation_steps=4).train(9, clip=1.0)
    offloaded = prepare(SSDOffloadPlugin(), gradient_accumulation_steps=4).train(9, clip=1.0)
    assert_same(offloaded, plain)
    assert min(moved(offloaded.engine, client) for client in ("activations", "optimizer")) > 0
    # Ten batches an epoch: Accelerate also steps after the last one.
    group = [(0, False), (1, False), (2, False), (3, True)]
    # Before `attach` it is said that gradients accumulate.
    assert hints == [(0, False), *3 * [*group, *group, (0, False), (1, True)]]


def test_eager_updates_are_identical_and_clipping_is_refused_in_the_first_step() -> None:
    options = {"gradient_accumulation_steps": 4}
    plain = prepare(**options).train(9)
    assert_same(prepare(SSDOffloadPlugin(EAGER), **options).train(9), plain)
    with pytest.raises(OffloadError, match=r"overlap: commit"):
        prepare(SSDOffloadPlugin(EAGER)).train(1, clip=1.0)


def test_accumulation_by_hand_is_identical() -> None:
    runs = []
    for plugin in (None, SSDOffloadPlugin()):
        run = prepare(plugin)
        for index, (x, y) in enumerate([*run.loader, *run.loader]):
            loss = nn.functional.mse_loss(run.model(x), y) / 4
            run.accelerator.backward(loss)
            run.losses.append(loss.item())
            if index % 4 == 3:
                run.optimizer.step()
                run.optimizer.zero_grad()
        runs.append(run)
    assert_same(runs[1], runs[0])


def test_preparing_one_by_one_and_in_another_order_is_identical() -> None:
    plain = prepare().train(10)
    assert_same(prepare(SSDOffloadPlugin(), one_by_one=True).train(10), plain)


# ---------------------------------------------------------------------- what is attached


def test_the_optimizer_is_wrapped_below_accelerates_own_and_only_once() -> None:
    run = prepare(SSDOffloadPlugin())
    wrapped = run.optimizer.optimizer
    assert isinstance(wrapped, OffloadedOptimizer)
    again = run.accelerator.prepare(run.optimizer)
    assert again is run.optimizer
    assert again.optimizer is wrapped
    assert run.accelerator.prepare(run.model) is run.model


def test_what_is_not_to_be_offloaded_is_left_alone() -> None:
    accelerator, model = offloading(), tiny_model()
    accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.prepare(nn.MSELoss())
    assert not model._forward_pre_hooks
    # Evaluated first and trained then, as a Trainer may: now it is.
    accelerator.prepare(model)
    assert model._forward_pre_hooks
    # The script may have attached an optimizer itself.
    with OffloadEngine() as own:
        optimizer = own.attach(other := tiny_model(), torch.optim.AdamW(other.parameters()))
        assert accelerator.prepare(optimizer).optimizer is optimizer


def test_each_scheduler_waits_for_its_own_optimizer() -> None:
    inner = [torch.optim.AdamW(tiny_model().parameters()) for _ in range(2)]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in inner]
    prepared = offloading().prepare(*inner, *schedules)
    for optimizer, schedule in zip(prepared[:2], prepared[2:], strict=True):
        assert schedule.optimizers == [optimizer]


def test_without_a_plugin_and_without_the_variable_nothing_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # $SSD_OFFLOAD_CONFIG is set in every test here: a default, and not a decision.
    run = prepare()
    assert session_of(run.accelerator) is None
    assert not isinstance(run.optimizer.optimizer, OffloadedOptimizer)
    assert not run.model._forward_pre_hooks

    monkeypatch.setenv("ACCELERATE_USE_SSD_OFFLOAD", "1")
    run = prepare()
    assert isinstance(run.optimizer.optimizer, OffloadedOptimizer)
    assert run.engine.config.activations.min_size == 1024
    run = prepare(SSDOffloadPlugin({"optimizer": {"enabled": False}}))  # the plugin wins
    assert not isinstance(run.optimizer.optimizer, OffloadedOptimizer)
    assert run.engine.config.activations.min_size == 1 << 20

    monkeypatch.setenv("SSD_OFFLOAD_DISABLE", "1")
    assert session_of(prepare().accelerator) is None
    # Other handlers arrive.
    handlers = [scaler := GradScalerKwargs(init_scale=2.0), SSDOffloadPlugin()]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
    assert accelerator.scaler_handler is scaler
    assert session_of(accelerator) is not None


def test_a_pickled_accelerator_offloads_too() -> None:
    original = prepare(SSDOffloadPlugin(metrics_every=3))
    original.accelerator._optimizers.clear()  # these say that they cannot be pickled
    original.accelerator._schedulers.clear()
    run = prepare(accelerator=pickle.loads(pickle.dumps(original.accelerator))).train(10)
    assert run.engine is not original.engine
    assert_same(run, prepare().train(10))


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_training_resumes_from_a_saved_state_with_and_without_offload(
    tmp_path: Path, first: bool, second: bool
) -> None:
    plain = prepare().train(20)

    begun = prepare(SSDOffloadPlugin() if first else None).train(10)
    begun.accelerator.save_state(str(tmp_path / "state"))
    resumed = prepare(SSDOffloadPlugin() if second else None)
    resumed.accelerator.load_state(str(tmp_path / "state"))
    resumed.train(10)
    assert begun.losses + resumed.losses == plain.losses
    assert_equal(resumed.parameters, plain.parameters)


# ---------------------------------------------------------------------- lifecycle


def test_free_memory_and_a_new_prepare_close_the_engine_and_open_another() -> None:
    run = prepare(SSDOffloadPlugin()).train(3)
    engine = run.engine
    run.accelerator.free_memory()
    again = prepare(accelerator=run.accelerator).train(10)
    assert engine.closed
    assert not run.model._forward_pre_hooks
    with pytest.raises(OffloadError, match="closed"):
        run.optimizer.step()
    assert again.engine is not engine
    assert_same(again, prepare().train(10))


def test_no_thread_is_alive_after_the_end_of_training_and_states_can_be_saved(
    tmp_path: Path,
) -> None:
    before = set(threading.enumerate())
    run = prepare(SSDOffloadPlugin()).train(3)
    run.accelerator.end_training()
    assert set(threading.enumerate()) <= before
    run.accelerator.save_state(str(tmp_path / "state"))
    assert_same(run.train(7), prepare().train(3).train(7))


def test_free_memory_closes_the_engine_once_the_script_has_let_go() -> None:
    run = prepare(SSDOffloadPlugin()).train(3)
    accelerator, engine = run.accelerator, run.engine
    model, optimizer, scheduler = run.model, run.optimizer, run.scheduler
    del run
    model, optimizer, scheduler = accelerator.clear(model, optimizer, scheduler)
    assert engine.closed


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_kept_model_with_a_new_optimizer_after_free_memory_is_identical(one_by_one: bool) -> None:
    runs = []
    for plugin in (None, SSDOffloadPlugin()):
        run = prepare(plugin).train(5)
        run.accelerator.free_memory()
        fresh = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
        if one_by_one:
            run.model, run.optimizer = map(run.accelerator.prepare, (run.model, fresh))
        else:
            run.model, run.optimizer = run.accelerator.prepare(run.model, fresh)
        runs.append(run.train(10))
    assert_same(runs[1], runs[0])
    assert moved(runs[1].engine) > 0


def test_an_optimizer_that_is_prepared_again_says_what_to_do() -> None:
    run = prepare(SSDOffloadPlugin()).train(1)
    with pytest.raises(ConfigError) as caught:
        run.accelerator.prepare(run.optimizer.optimizer.inner)
    assert any("free_memory" in note for note in caught.value.__notes__)
    run.train(1)  # The first one goes on.


# ---------------------------------------------------------------------- bad input


def test_what_is_wrong_is_refused_when_the_plugin_or_the_accelerator_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        SSDOffloadPlugin({"optimzer": {}})
    with pytest.raises(ConfigError, match="more than one SSDOffloadPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[SSDOffloadPlugin(), SSDOffloadPlugin()])
    for value in ("often", "-1"):
        monkeypatch.setenv("SSD_OFFLOAD_METRICS_EVERY", value)
        with pytest.raises(ConfigError, match=value):
            SSDOffloadPlugin()


def test_an_engine_for_many_devices_that_is_not_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: "MEGATRON_LM"))
    with pytest.raises(ConfigError, match=r"MEGATRON_LM: launch with distributed_type 'NO', "):
        offloading()
    Accelerator(cpu=True)


# ---------------------------------------------------------------------- metrics

WRITTEN = "offload/activations/written_bytes"


@pytest.mark.parametrize(
    ("plugin", "every", "steps"),
    [
        ({"metrics_every": 5}, 1, [0, 5, 10]),
        ({"metrics_every": 4}, 3, [0, 6, 9]),
        ({"metrics_every": 0}, 1, []),
        (None, 1, []),
    ],
    ids=["every five steps", "the last at the end of training", "off", "plain"],
)
def test_metrics_ride_on_the_scripts_own_logging(
    tmp_path: Path, plugin: dict[str, int] | None, every: int, steps: list[int]
) -> None:
    options = {"log_with": "tensorboard", "project_dir": str(tmp_path)}
    run = prepare(None if plugin is None else SSDOffloadPlugin(**plugin), **options)
    run.accelerator.init_trackers("run")
    for step in range(11):
        run.train(1)
        if step % every == 0:
            run.accelerator.log({"loss": run.losses[-1]}, step=step)
    run.accelerator.end_training()
    scalars = tensorboard_scalars(tmp_path / "run")
    assert [step for step, _ in scalars["loss"]] == list(range(0, 11, every))
    if not steps:
        assert set(scalars) == {"loss"}
        return
    assert [step for step, _ in scalars[WRITTEN]] == steps
    # Of what a tiny model saves, it depends on the moment whether any leaves; states always do.
    values = [value for _, value in scalars["offload/transfer/busy_seconds"]]
    assert 0 < values[0] < values[1] < values[2]


def test_the_scripts_values_win(tmp_path: Path) -> None:
    options = {"log_with": "tensorboard", "project_dir": str(tmp_path)}
    run = prepare(SSDOffloadPlugin(), **options).train(1)
    run.accelerator.init_trackers("mine")
    run.accelerator.log({WRITTEN: -1.0}, step=1)
    run.accelerator.end_training()
    assert tensorboard_scalars(tmp_path / "mine")[WRITTEN] == [(1, -1.0)]


# ---------------------------------------------------------------------- streamed checkpoints


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were saved through ours, and mapped when they were loaded."""
    names: list[str] = []
    save, load = offload_strategy.checkpoints.save, torch.load

    def note_save(obj: Any, path: Path) -> None:
        names.append(f"saved {Path(path).name}")
        save(obj, path)

    def note_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mmap"):
            names.append(f"mapped {Path(f).name}")
        return load(f, *args, **kwargs)

    monkeypatch.setattr(offload_strategy.checkpoints, "save", note_save)
    monkeypatch.setattr(torch, "load", note_load)
    return names


def test_the_file_of_an_offloaded_optimizer_is_accelerates_own_and_streamed(
    tmp_path: Path, streamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tiny model's tensors stay in the file as those of a large one do.
    monkeypatch.setattr(offload_strategy.checkpoints.private_maps, "SMALL_BYTES", 64)
    folders = tmp_path / "plain", tmp_path / "ours"
    for plugin, folder in zip((None, SSDOffloadPlugin()), folders, strict=True):
        run = prepare(plugin).train(3)
        run.accelerator.save_state(str(folder))
    assert streamed == ["saved optimizer.bin"]  # and no other file
    run.accelerator.load_state(str(folders[1]))
    assert streamed == ["saved optimizer.bin", "mapped optimizer.bin"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    plain, ours = (torch.load(folder / "optimizer.bin") for folder in folders)
    assert len({tuple(sorted(p.name for p in folder.iterdir())) for folder in folders}) == 1
    assert same(ours, plain)


def test_a_plain_optimizer_and_files_outside_of_a_state_are_left_to_accelerate(
    tmp_path: Path, streamed: list[str]
) -> None:
    only_activations = SSDOffloadPlugin({"optimizer": {"enabled": False}})
    for number, plugin in enumerate((None, only_activations)):
        run = prepare(plugin).train(3)
        run.accelerator.save_state(str(tmp_path / str(number)))
        run.accelerator.load_state(str(tmp_path / str(number)))
    prepare(SSDOffloadPlugin()).train(1)
    checkpointing.save({"a": torch.ones(3)}, tmp_path / "optimizer.bin")
    assert torch.equal(checkpointing.load(tmp_path / "optimizer.bin")["a"], torch.ones(3))
    assert streamed == []
