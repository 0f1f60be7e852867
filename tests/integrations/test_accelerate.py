"""The engine inside `Accelerator.prepare`, against the same loop without, to the last bit."""

import gc
import math
import pickle
import threading
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, checkpointing, init_empty_weights
from accelerate.utils import GradScalerKwargs
from torch import nn

import offload_strategy.checkpoints
from offload_strategy import ConfigError, OffloadEngine, OffloadError, SSDOffloadPlugin
from offload_strategy.integrations.accelerate.plugin import session_of
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.distributed.loops import same
from tests.integrations.accelerate_runs import Run, forget_accelerator, prepare, with_and_without
from tests.integrations.lightning_runs import assert_equal, assert_same, batches, tiny_model
from tests.integrations.support import STREAMED, tensorboard_scalars
from tests.training import left_bytes

EAGER = {"optimizer": {"overlap": "eager"}}


def offloading():
    return Accelerator(cpu=True, kwargs_handlers=[SSDOffloadPlugin()])


def test_accumulation_clipping_and_a_scheduler_are_identical(hints):
    def train(plugin):
        return prepare(plugin, gradient_accumulation_steps=4).train(9, clip=1.0)

    engine = with_and_without(train).engine
    metrics = engine.metrics()
    assert min(left_bytes(metrics, client) for client in ("activations", "optimizer")) > 0
    # Ten batches an epoch: Accelerate also steps after the last one.
    group = [False, False, False, True]
    # Before `attach` it is said that gradients accumulate.
    assert hints == [False, *3 * [*group, *group, False, True]]


def test_eager_updates_are_identical_and_clipping_is_refused_in_the_first_step():
    with_and_without(lambda it: prepare(it, gradient_accumulation_steps=4).train(9), EAGER)
    with pytest.raises(OffloadError, match=r"overlap: commit"):
        prepare(SSDOffloadPlugin(EAGER)).train(1, clip=1.0)


def test_each_model_and_optimizer_is_attached_once_and_what_is_not_trained_never():
    run = prepare(SSDOffloadPlugin())
    wrapped = run.optimizer.optimizer
    assert isinstance(wrapped, OffloadedOptimizer)
    assert run.accelerator.prepare(run.optimizer) is run.optimizer
    assert run.optimizer.optimizer is wrapped
    assert run.accelerator.prepare(run.model) is run.model

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


def test_each_scheduler_waits_for_its_own_optimizer():
    inner = [torch.optim.AdamW(tiny_model().parameters()) for _ in range(2)]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer) for optimizer in inner]
    prepared = offloading().prepare(*inner, *schedules)
    for optimizer, schedule in zip(prepared[:2], prepared[2:], strict=True):
        assert schedule.optimizers == [optimizer]


def test_without_a_plugin_or_the_variable_nothing_is_attached(monkeypatch):
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


def test_what_is_wrong_is_refused_at_once(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'optimizer'"):
        SSDOffloadPlugin({"optimzer": {}})
    with pytest.raises(ConfigError, match="more than one SSDOffloadPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[SSDOffloadPlugin(), SSDOffloadPlugin()])
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "distributed_type", property(lambda self: "MEGATRON_LM"))
        with pytest.raises(ConfigError, match=r"MEGATRON_LM: launch with distributed_type 'NO', "):
            offloading()
        Accelerator(cpu=True)
    for value in ("often", "-1"):
        monkeypatch.setenv("SSD_OFFLOAD_METRICS_EVERY", value)
        with pytest.raises(ConfigError, match=value):
            SSDOffloadPlugin()


@pytest.fixture(scope="module")
def ten_steps():
    """What ten steps without offload come to."""
    run = prepare().train(10)
    forget_accelerator()
    return run


def test_a_pickled_accelerator_offloads_too(ten_steps):
    original = prepare(SSDOffloadPlugin(metrics_every=3))
    original.accelerator._optimizers.clear()  # these say that they cannot be pickled
    original.accelerator._schedulers.clear()
    run = prepare(accelerator=pickle.loads(pickle.dumps(original.accelerator))).train(10)
    assert run.engine is not original.engine
    assert_same(run, ten_steps)


def test_free_memory_and_a_new_prepare_close_the_engine_and_open_another(ten_steps):
    run = prepare(SSDOffloadPlugin()).train(3)
    engine = run.engine
    with pytest.raises(ConfigError) as caught:
        run.accelerator.prepare(run.optimizer.optimizer.inner)
    assert any("free_memory" in note for note in caught.value.__notes__)
    run.train(1)  # The first one goes on.
    run.accelerator.free_memory()
    again = prepare(accelerator=run.accelerator).train(10)
    assert engine.closed
    assert not run.model._forward_pre_hooks
    with pytest.raises(OffloadError, match="closed"):
        run.optimizer.step()
    assert again.engine is not engine
    assert_same(again, ten_steps)


def test_free_memory_closes_the_engine_once_the_script_has_let_go():
    run = prepare(SSDOffloadPlugin()).train(3)
    accelerator, engine = run.accelerator, run.engine
    objects = run.model, run.optimizer, run.scheduler
    del run
    objects = accelerator.clear(*objects)
    assert engine.closed


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_a_kept_model_with_a_new_optimizer_after_free_memory_is_identical(order):
    def train(plugin):
        run = prepare(plugin).train(5)
        run.accelerator.free_memory()
        fresh = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
        if order == "together":
            run.model, run.optimizer = run.accelerator.prepare(run.model, fresh)
        elif order == "model first":
            run.model, run.optimizer = map(run.accelerator.prepare, (run.model, fresh))
        else:
            run.optimizer = run.accelerator.prepare_optimizer(fresh)
            run.model = run.accelerator.prepare_model(run.model)
        return run.train(10)

    assert left_bytes(with_and_without(train).engine.metrics()) > 0


@pytest.mark.parametrize("kept", [True, False], ids=["first kept", "first gone"])
def test_a_second_accelerator_goes_on_with_the_model_and_with_an_optimizer_that_it_is_given(kept):
    def train(plugin):
        first = prepare(plugin).train(5)
        plain = getattr(first.optimizer.optimizer, "inner", first.optimizer.optimizer)
        handlers = [] if plugin is None else [plugin]
        second = Accelerator(cpu=True, kwargs_handlers=handlers)
        fresh = torch.optim.AdamW(first.model.parameters(), lr=1e-3)
        engine = first.engine
        if not kept:
            first.accelerator = first.optimizer = first.scheduler = None
            gc.collect()
            assert engine is None or engine.closed  # although the model is kept
        given = plain if kept else fresh
        model, optimizer, loader = second.prepare(first.model, given, batches())
        schedule = torch.optim.lr_scheduler.ConstantLR(given)
        run = Run(second, model, optimizer, loader, second.prepare(schedule)).train(5)
        assert engine is None or engine.closed
        return run

    assert left_bytes(with_and_without(train).engine.metrics()) > 0


def test_an_optimizer_is_used_as_it_was_prepared_and_by_its_own_accelerator():
    run = prepare(SSDOffloadPlugin()).train(3)
    saved, inner = run.optimizer.state_dict(), run.optimizer.optimizer.inner
    for refused in (inner.state_dict, lambda: inner.load_state_dict(saved)):
        with pytest.raises(OffloadError, match="Use the optimizer that attach or prepare returned"):
            refused()
    with pytest.raises(ConfigError, match="was prepared by another Accelerator"):
        offloading().prepare(run.optimizer)


@pytest.fixture
def streamed(monkeypatch):
    """Names of the files that were saved through ours, and mapped when they were loaded."""
    names = []
    save, load = offload_strategy.checkpoints.save, torch.load

    def note_save(obj, path):
        names.append(f"saved {Path(path).name}")
        save(obj, path)

    def note_load(f, *args, **options):
        names.extend([f"mapped {Path(f).name}"] if options.get("mmap") else [])
        return load(f, *args, **options)

    monkeypatch.setattr(offload_strategy.checkpoints, "save", note_save)
    monkeypatch.setattr(torch, "load", note_load)
    return names


def test_checkpoints_are_streamed_in_accelerates_own_files_and_resume_with_and_without_offload(
    tmp_path, streamed, monkeypatch
):
    # A tiny model's tensors stay in the file as those of a large one do.
    monkeypatch.setattr(offload_strategy.checkpoints.copy_on_write_maps, "SMALL_BYTES", 64)
    threads = set(threading.enumerate())
    folders = {False: tmp_path / "plain", True: tmp_path / "ours"}
    begun = {}
    for offload, folder in folders.items():
        begun[offload] = prepare(SSDOffloadPlugin() if offload else None).train(10)
        begun[offload].accelerator.end_training()
        assert set(threading.enumerate()) <= threads
        begun[offload].accelerator.save_state(str(folder))
    assert streamed == ["saved optimizer.bin"]  # and no other file
    names, own_names = ({path.name for path in folder.iterdir()} for folder in folders.values())
    assert names == own_names
    assert same(*(torch.load(folder / "optimizer.bin") for folder in folders.values()))

    plain = begun[False].train(10)
    assert_same(begun[True].train(10), plain)
    for offload, folder in folders.items():
        resumed = prepare(None if offload else SSDOffloadPlugin())
        resumed.accelerator.load_state(str(folder))
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        resumed.train(10)
        assert resumed.losses == plain.losses[10:]
        assert_equal(resumed.parameters, plain.parameters)
    assert streamed == ["saved optimizer.bin", "mapped optimizer.bin"]


def test_other_files_are_left_to_accelerate(tmp_path, streamed):
    run = prepare(SSDOffloadPlugin({"optimizer": {"enabled": False}})).train(3)
    run.accelerator.save_state(str(tmp_path / "state"))
    run.accelerator.load_state(str(tmp_path / "state"))
    prepare(SSDOffloadPlugin()).train(1)
    checkpointing.save({"a": torch.ones(3)}, tmp_path / "optimizer.bin")
    assert torch.equal(checkpointing.load(tmp_path / "optimizer.bin")["a"], torch.ones(3))
    assert streamed == []


def test_streamed_weights_of_an_empty_model_are_filled():
    plugin = SSDOffloadPlugin({**STREAMED, **EAGER})
    run = prepare(plugin, make_model=init_empty_weights()(tiny_model)).train(3)
    assert all(map(math.isfinite, run.losses))
    run.accelerator.free_memory(run.model, run.optimizer)


WRITTEN = "offload/activations/written_bytes"


@pytest.mark.parametrize(
    ("plugin", "every", "steps"),
    [
        ({"metrics_every": 5}, 1, [0, 5, 10]),
        ({"metrics_every": 5}, 3, [0, 6, 9]),
        ({"metrics_every": 0}, 1, []),
        (None, 1, []),
    ],
    ids=["every five steps", "the last at the end of training", "off", "plain"],
)
def test_metrics_ride_on_the_scripts_own_logging(tmp_path, plugin, every, steps):
    options = {"log_with": "tensorboard", "project_dir": str(tmp_path)}
    run = prepare(None if plugin is None else SSDOffloadPlugin(**plugin), **options)
    run.accelerator.init_trackers("run")
    for step in range(11):
        run.train(1)
        if step % every == 0:
            own = {WRITTEN: -1.0} if steps and step == 0 else {}
            run.accelerator.log({"loss": run.losses[-1], **own}, step=step)
    run.accelerator.end_training()
    scalars = tensorboard_scalars(tmp_path / "run")
    assert [step for step, _ in scalars["loss"]] == list(range(0, 11, every))
    if not steps:
        assert set(scalars) == {"loss"}
        return
    assert [step for step, _ in scalars[WRITTEN]] == steps
    assert scalars[WRITTEN][0] == (0, -1.0), "the script's own values win"
    # Of what a tiny model saves, it depends on the moment whether any leaves; states always do.
    values = [value for _, value in scalars["offload/transfer/busy_seconds"]]
    assert 0 < values[0] < values[1] < values[2]
