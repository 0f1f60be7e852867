"""Ends of every kind, through Lightning and Accelerate: nothing hangs, nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadError
from tests.integrations.lightning_runs import (
    Run,
    assert_equal,
    assert_same,
    batches,
    fit,
    make_module,
    make_trainer,
    tiny_model,
)
from tests.integrations.support import environment


def open_files(directory: Path, process: int | str = "self") -> list[str]:
    """Files of a process below a directory, deleted ones included."""
    found = []
    for entry in os.scandir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        if target.startswith(f"{directory}/"):
            found.append(target)
    return found


def plain_steps(model: nn.Module) -> list[torch.Tensor]:
    """Train a model by hand, without anything of ours."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- fit, and fit again


def test_fitting_twice_with_one_trainer_is_identical(pl: Any, tmp_path: Path) -> None:
    runs, engines = [], []
    for strategy in ("auto", "ssd_offload"):
        run = fit(pl, tmp_path, strategy, max_steps=-1, max_epochs=1)
        engines.append(getattr(run.trainer.strategy, "offload_engine", None))
        run.trainer.fit_loop.max_epochs = 3
        run.trainer.fit(run.module, batches())
        runs.append(run)
    assert_same(runs[1], runs[0])
    assert len(runs[0].losses) == 30
    assert engines[1].closed
    assert not runs[1].engine.closed


def test_fitting_twice_with_two_trainers_is_identical(pl: Any, tmp_path: Path) -> None:
    runs, trainers = [], []
    for strategy in ("auto", "ssd_offload"):
        first = fit(pl, tmp_path, strategy, max_steps=7)
        trainers.append(first.trainer)
        runs.append(fit(pl, tmp_path, strategy, first.module, max_steps=7))
    assert_same(runs[1], runs[0])
    with pytest.raises(OffloadError, match="closed"):
        trainers[1].save_checkpoint(tmp_path / "too_late.ckpt")


def test_two_modules_around_one_network_are_fitted_in_turn(pl: Any, tmp_path: Path) -> None:
    trained = []
    for strategy in ("auto", "ssd_offload"):
        first = fit(pl, tmp_path, strategy, max_steps=5)
        second = make_module(pl)
        second.net = first.module.net
        fit(pl, tmp_path, strategy, second, max_steps=5)
        trained.append(Run(None, second))
    assert_same(trained[1], trained[0])


@pytest.mark.parametrize("trainers", [1, 2])
def test_an_optimizer_that_outlives_a_fit_keeps_its_states(
    pl: Any, tmp_path: Path, trainers: int
) -> None:
    runs = []
    for strategy in ("auto", "ssd_offload"):
        module = make_module(pl)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        module.configure_optimizers = lambda optimizer=optimizer: optimizer
        run = fit(pl, tmp_path, strategy, module, max_steps=-1, max_epochs=1)
        if trainers == 1:
            run.trainer.fit_loop.max_epochs = 2
            run.trainer.fit(module, batches())
        else:
            run = Run(fit(pl, tmp_path, strategy, module, max_steps=10).trainer, module)
        runs.append(run)
    assert len(runs[0].losses) == 20
    assert_same(runs[1], runs[0])


def test_after_fit_the_model_trains_by_itself(pl: Any, tmp_path: Path) -> None:
    plain, offloaded = (fit(pl, tmp_path, name, max_steps=5) for name in ("auto", "ssd_offload"))
    # The last states are still on their way, and are counted when they have arrived.
    offloaded.engine._resources.store.wait_for_writes()
    before = offloaded.engine.metrics()
    assert_equal(plain_steps(offloaded.module), plain_steps(plain.module))
    after = offloaded.engine.metrics()
    for key in ("activations/written_bytes", "optimizer/written_bytes"):
        assert after[f"offload/{key}"] == before[f"offload/{key}"]


def test_the_engine_closes_when_the_trainer_is_gone(pl: Any, tmp_path: Path, tier: Path) -> None:
    threads = set(threading.enumerate())
    run = fit(pl, tmp_path, "ssd_offload", max_steps=5)
    engine = weakref.ref(run.engine)
    model = run.module.net
    assert len(open_files(tier)) == 1
    del run
    gc.collect()
    assert engine() is None or engine().closed
    assert open_files(tier) == []
    assert set(threading.enumerate()) <= threads
    plain_steps(model)


# ---------------------------------------------------------------------- errors


class Expected(Exception):
    pass


def test_an_exception_in_the_middle_of_fit_leaves_a_model_that_trains_on(
    pl: Any, tmp_path: Path
) -> None:
    runs = []
    for strategy in ("auto", "ssd_offload"):
        module = make_module(pl, fails_at=(5, Expected()))
        trainer = make_trainer(pl, tmp_path, strategy, accumulate_grad_batches=2)
        with pytest.raises(Expected):
            trainer.fit(module, batches())
        assert not module._forward_pre_hooks
        module.fails_at = None
        runs.append(fit(pl, tmp_path, strategy, module, max_steps=5))
    assert_same(runs[1], runs[0])


def test_an_exception_inside_the_forward_pass_does_no_harm(pl: Any, tmp_path: Path) -> None:
    module = make_module(pl)
    fails = module.net[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Expected()))
    with pytest.raises(Expected):
        fit(pl, tmp_path, "ssd_offload", module)
    fails.remove()
    assert_same(fit(pl, tmp_path, "ssd_offload", module), fit(pl, tmp_path))


def test_an_error_while_attaching_leaves_nothing_open(pl: Any, tmp_path: Path, tier: Path) -> None:
    gc.collect()
    module = make_module(pl, optimizer=torch.optim.LBFGS)
    trainer = make_trainer(pl, tmp_path, "ssd_offload")
    with pytest.raises(OffloadError, match="LBFGS"):
        trainer.fit(module, batches())
    assert open_files(tier) == []
    assert not module._forward_pre_hooks
    module.make_optimizer = torch.optim.AdamW
    assert_same(fit(pl, tmp_path, "ssd_offload", module), fit(pl, tmp_path))


# ---------------------------------------------------------------------- processes

LIGHTNING = """
import sys
import lightning.pytorch as pl
from torch.utils.data import DataLoader
from tests.integrations.lightning_runs import batches, fit, make_module
if sys.argv[1] == "workers":
    loader = DataLoader(batches().dataset, batch_size=16, num_workers=2)
else:
    loader = batches()
ends = sys.argv[1] in ("normal", "workers")
module = make_module(pl)
original = module.training_step
def training_step(batch, batch_idx):
    if len(module.losses) == 3:
        print("training", flush=True)
        if sys.argv[1] == "exception":
            raise RuntimeError("on purpose")
    return original(batch, batch_idx)
module.training_step = training_step
trainer = pl.Trainer(
    strategy="ssd_offload", accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, max_epochs=2 if ends else -1,
)
trainer.fit(module, loader)
print("done", flush=True)
"""

ACCELERATE = """
import sys
from offload_strategy import SSDOffloadPlugin
from tests.integrations.accelerate_runs import prepare
run = prepare(SSDOffloadPlugin()).train(3)
print("training", flush=True)
if sys.argv[1] == "exception":
    raise RuntimeError("on purpose")
run.train(3 if sys.argv[1] == "normal" else 10**9)
print("done", flush=True)
"""

SCRIPTS = {"lightning": LIGHTNING, "accelerate": ACCELERATE}
SIGNALS = {"interrupt": signal.SIGINT, "kill": signal.SIGKILL, "terminate": signal.SIGTERM}
ENDS = [
    ("lightning", "normal", 0),
    ("lightning", "workers", 0),
    ("lightning", "exception", 1),
    ("lightning", "interrupt", 1),
    ("lightning", "kill", -signal.SIGKILL),
    ("accelerate", "normal", 0),
    ("accelerate", "exception", 1),
    ("accelerate", "interrupt", -signal.SIGINT),
    ("accelerate", "kill", -signal.SIGKILL),
    ("accelerate", "terminate", -signal.SIGTERM),
]


@dataclass
class Ended:
    """A process that trained and ended one way or another."""

    status: int
    errors: str
    files_while_training: list[str]
    files_left: list[Path]


def train_and_end(home: Path, framework: str, end: str) -> Ended:
    tier = home / f"{framework}-{end}"
    tier.mkdir()
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPTS[framework], end],
        cwd=home,
        env=environment(
            tier,
            PYTHONPATH=path,
            SSD_OFFLOAD_CONFIG='{"activations": {"min_size": "1KiB"}}',
            HF_HOME=str(home / "hf"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    in_use: list[str] = []
    try:
        assert process.stdout is not None
        while "training" not in (line := process.stdout.readline()):
            assert line, process.communicate()
        if end in SIGNALS:
            in_use = open_files(tier, process.pid)
            time.sleep(0.2)
            process.send_signal(SIGNALS[end])
        try:
            _, errors = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            # Python drops a KeyboardInterrupt that arrives inside a finalizer: press Ctrl-C again.
            process.send_signal(SIGNALS.get(end, signal.SIGKILL))
            _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    return Ended(process.returncode, errors, in_use, list(tier.iterdir()))


@pytest.mark.parametrize(("framework", "end", "status"), ENDS)
def test_a_process_ends_in_time_and_leaves_nothing_on_disk(
    tmp_path: Path, framework: str, end: str, status: int
) -> None:
    process = train_and_end(tmp_path, framework, end)
    assert process.status == status, process.errors
    assert process.files_left == []
    if end in SIGNALS:
        assert len(process.files_while_training) == 1
    if status == 0:
        assert "Traceback" not in process.errors


def test_the_tiny_model_is_big_enough_to_leave() -> None:
    # The tests above would prove nothing otherwise.
    x = torch.randn(16, 32)
    saved: list[int] = []
    pack = lambda t: saved.append(t.untyped_storage().nbytes()) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        tiny_model()(x)
    assert max(saved) > 1024
