"""Ends of every kind, through Lightning and Accelerate: nothing hangs, nothing is left behind."""

import gc
import signal
import threading
import time
import weakref
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from offload_strategy import OffloadError, SSDOffloadPlugin
from offload_strategy.io.backends.posix import PosixBackend
from tests.distributed.ranks import run_ranks
from tests.ends import open_files, outcomes
from tests.integrations import lightning_runs
from tests.integrations.accelerate_runs import prepare
from tests.integrations.lightning_runs import assert_equal, batches, fit, make_module
from tests.training import moved, on_disk


def plain_steps(model):
    """Train a model by hand, without anything of ours."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return lightning_runs.parameters_of(model)


def slowly(move):
    """A backend's method that moves bytes, so slow that writes end after the step."""
    return lambda self, *args: (time.sleep(0.05), move(self, *args))[1]


def optimizer_of_its_own(pl):
    """A module that returns the same optimizer in every fit, which keeps its states."""
    module = make_module(pl)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.configure_optimizers = lambda: optimizer
    return module


class HalfMomentum(torch.optim.Optimizer):
    """Keeps momentum in bfloat16, whatever the weights are."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["momentum"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(state["momentum"], alpha=0.05)
        return loss


def half_momentum_of_its_own(pl):
    """The same, with states of another dtype than the weights, which they keep as well."""
    module = make_module(pl)
    optimizer = HalfMomentum(module.parameters(), {"lr": 0.05})
    module.configure_optimizers = lambda: optimizer
    return module


def with_one_trainer(pl, root, strategy, module):
    run = fit(pl, root, strategy, module, max_steps=-1, max_epochs=1)
    engine = run.engine if strategy == "ssd_offload" else None
    run.trainer.fit_loop.max_epochs = 3
    run.trainer.fit(run.module, batches())
    if engine is not None:
        assert engine.closed
        assert not run.engine.closed
    return run


def with_two_trainers(pl, root, strategy, module):
    first = fit(pl, root, strategy, module, max_steps=7)
    run = fit(pl, root, strategy, module, max_steps=7)
    if strategy == "ssd_offload":
        with pytest.raises(OffloadError, match="closed"):
            first.trainer.save_checkpoint(root / "too_late.ckpt")
    return run


def with_two_modules_around_one_network(pl, root, strategy, module):
    fit(pl, root, strategy, module, max_steps=5)
    second = make_module(pl)
    second.net = module.net
    return fit(pl, root, strategy, second, max_steps=5)


def after_an_exception(pl, root, strategy, module):
    """In the middle of a forward pass, of a step of two micro-batches."""

    def fails(*_):
        if len(module.losses) == 5:
            raise ZeroDivisionError

    hook = module.net[1].register_forward_pre_hook(fails)
    with pytest.raises(ZeroDivisionError):
        fit(pl, root, strategy, module, accumulate_grad_batches=2)
    assert not module._forward_pre_hooks
    hook.remove()
    return fit(pl, root, strategy, module, max_steps=5)


@pytest.mark.parametrize(
    ("twice", "make"),
    [
        (with_one_trainer, make_module),
        (with_two_trainers, make_module),
        (with_two_modules_around_one_network, make_module),
        (after_an_exception, make_module),
        (with_one_trainer, optimizer_of_its_own),
        (with_two_trainers, optimizer_of_its_own),
        (with_two_trainers, half_momentum_of_its_own),
    ],
)
def test_fitting_twice_is_identical(pl, tmp_path, twice, make):
    lightning_runs.with_and_without(lambda strategy: twice(pl, tmp_path, strategy, make(pl)))


@pytest.mark.parametrize("wrong", ["missing", "file", "LBFGS"])
def test_an_error_while_attaching_comes_before_the_first_step_and_leaves_nothing_open(
    pl, family, tmp_path, tier, wrong
):
    gc.collect()
    (tmp_path / "file").write_text("")
    config = {"tiers": [{"name": "there", "kind": "ssd", "path": str(tmp_path / wrong)}]}
    module = make_module(pl)
    if wrong == "LBFGS":
        module.make_optimizer = torch.optim.LBFGS
        config = {"optimizer": {"enabled": True}}
    with pytest.raises(OffloadError, match=wrong):
        fit(pl, tmp_path, lightning_runs.strategy_class(family)(config), module)
    assert (module.losses, open_files(tier)) == ([], [])
    assert not module._forward_pre_hooks
    module.make_optimizer = torch.optim.AdamW
    run = fit(pl, tmp_path, "ssd_offload", module, max_steps=5)
    lightning_runs.assert_same(run, fit(pl, tmp_path, max_steps=5))


def test_after_fit_the_model_trains_by_itself(pl, tmp_path, tier):
    threads = set(threading.enumerate())
    plain, offloaded = (fit(pl, tmp_path, name, max_steps=5) for name in ("auto", "ssd_offload"))
    # The last states are still on their way, and are counted when they have arrived.
    on_disk(offloaded.engine)
    before = [moved(offloaded.engine, client) for client in ("activations", "optimizer")]
    assert_equal(plain_steps(offloaded.module), plain_steps(plain.module))
    assert before == [moved(offloaded.engine, client) for client in ("activations", "optimizer")]

    engine, model = weakref.ref(offloaded.engine), offloaded.module.net
    assert sum(file.endswith("(deleted)") for file in open_files(tier)) == 1
    del offloaded
    gc.collect()
    assert engine() is None or engine().closed
    assert open_files(tier) == []
    assert set(threading.enumerate()) <= threads
    assert_equal(plain_steps(model), plain_steps(plain.module))


def test_no_thread_outlives_fit(pl, tmp_path, monkeypatch):
    before = set(threading.enumerate())
    runs = [fit(pl, tmp_path, "ssd_offload", max_steps=5) for _ in range(3)]
    assert set(threading.enumerate()) <= before
    for run in runs:  # each of the engines still has states on the tier
        for name in ("one", "two"):
            run.trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
            assert set(threading.enumerate()) <= before
    run = runs[0]
    trainer = run.trainer
    with monkeypatch.context() as patch:
        for method in ("move", "move_adjacent"):
            patch.setattr(PosixBackend, method, slowly(getattr(PosixBackend, method)))
        patch.setattr(run.module, "log", lambda *_, **__: None)  # there is nowhere to log to
        step = {"batch": next(iter(batches())), "batch_idx": 0}
        trainer.fit_loop.epoch_loop.automatic_optimization.run(trainer.optimizers[0], 0, step)
        assert set(threading.enumerate()) <= before
    loader = DataLoader(batches().dataset, batch_size=16, num_workers=1)
    trainer.validate(run.module, loader, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 10
    trainer.fit(run.module, batches())
    assert set(threading.enumerate()) <= before

    run.module.fails_at = (len(run.losses) + 2, KeyboardInterrupt())
    trainer.fit_loop.epoch_loop.max_steps = 20
    with pytest.raises(SystemExit):
        trainer.fit(run.module, batches())
    assert set(threading.enumerate()) <= before
    for _ in range(2):
        trainer.strategy.offload_engine.close()
        trainer.strategy.offload_engine.end_threads()


ENDS = {
    "lightning workers": 0,
    "lightning exception": 1,
    "lightning kill": -signal.SIGKILL,
    "accelerate normal": 0,
    "accelerate interrupt": -signal.SIGINT,
    "accelerate terminate": -signal.SIGTERM,
}
"""Exit status by framework and end; what is negative is the signal that each is sent."""


def train_with_lightning(end):
    pl = lightning.pytorch
    fails_at = (3, RuntimeError("on purpose")) if end == "exception" else None
    ready = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: print("ready", flush=True))
    options = {"max_steps": -1, "max_epochs": 2 if end == "workers" else -1}
    trainer = lightning_runs.make_trainer(pl, Path(), "ssd_offload", callbacks=[ready], **options)
    workers = 2 if end == "workers" else 0
    loader = DataLoader(batches().dataset, batch_size=16, num_workers=workers)
    trainer.fit(make_module(pl, fails_at=fails_at), loader)


def train_with_accelerate(end):
    run = prepare(SSDOffloadPlugin()).train(3)
    print("ready", flush=True)
    run.train(3 if end == "normal" else 10**9)


def every_end(rank, directory):
    scripts = {}
    for name, status in ENDS.items():
        framework, end = name.split()
        code = f"import {__name__} as ends; ends.train_with_{framework}({end!r})"
        scripts[name] = (code, max(0, -status))
    return outcomes(rank, directory, scripts)


def test_every_end_of_a_process_is_in_time_and_leaves_nothing_on_disk(tmp_path):
    (found,) = run_ranks(f"{__name__}:every_end", tmp_path, size=1, group=False)
    assert [end["status"] for end in found] == list(ENDS.values()), found
    for name, end in zip(ENDS, found, strict=True):
        assert end["left"] == [], name
        if end["status"] < 0:
            assert len(end["in_use"]) == 1, name
        if end["status"] == 0:
            assert "Traceback" not in end["errors"], name
