"""``overlap: eager``: gradients are gone after backward; test_exactness.py compares numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from offload_strategy.errors import OffloadError
from tests.optimizer.runs import Run, compare, loss_of, offloading
from tests.optimizer.test_exactness import OPTIMIZERS


def _scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=8)
    for number in range(6):
        run.optimizer.zero_grad()
        run.backward(number)
        run.optimizer.step()
        scheduler.step()
        run.note()


def _by_the_model(run: Run) -> None:
    for number in range(5):
        run.model.zero_grad()
        run.backward(number)
        run.optimizer.step()
    run.note()


def _gradient_by_hand(run: Run) -> None:
    for number in range(4):
        run.optimizer.zero_grad()
        run.backward(number)
        run.model.unused.weight.grad = torch.full((3, 3), 0.5)
        run.optimizer.step()
        run.note()


@pytest.mark.parametrize("script", [_scheduled, _by_the_model, _gradient_by_hand])
def test_the_same_numbers_with(script: Callable[[Run], None], disk: Path) -> None:
    compare(script, OPTIMIZERS["AdamW"], disk, "eager")


#: What reads or changes a gradient by another way; `gradients/test_consumed.py` has the operators.
READS: dict[str, Callable[[nn.Module], object]] = {
    "clip by norm": lambda m: clip_grad_norm_(m.parameters(), 1.0),
    "clip by value": lambda m: clip_grad_value_(m.parameters(), 1e9),
    "log a norm": lambda m: m.first.weight.grad.norm(),
}


@pytest.mark.parametrize("name", READS)
def test_reading_or_scaling_a_gradient_is_refused_from_the_first_step(
    name: str, disk: Path
) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        run.backward(0)
        with pytest.raises(OffloadError, match=r"optimizer\.overlap: commit"):
            READS[name](run.model)


def test_a_loss_scaler_is_refused_in_the_first_step(disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(loss_of(run.model, 0)).backward()
        with pytest.raises(OffloadError, match=r"optimizer\.overlap: commit"):
            scaler.step(run.optimizer)


def test_a_second_backward_before_the_step_is_refused(disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        run.backward(0)
        weights = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(OffloadError, match=r"accumulated|no step\(\) followed"):
            run.backward(1)
        assert all(map(torch.equal, weights, run.model.parameters()))


def test_shape_and_dtype_of_a_used_gradient_can_be_read(disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        run.backward(0)
        gradient = run.model.first.weight.grad
        assert gradient is not None
        assert gradient.shape == run.model.first.weight.shape
        assert gradient.dtype == torch.float32
        assert "consumed" in repr(gradient)


def test_weights_change_during_backward_and_gradients_are_freed(disk: Path) -> None:
    with offloading(disk, "eager", host="1MiB") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        seen: list[int] = []

        def count(_: torch.Tensor) -> None:
            seen.append(sum(reference() is not None for reference in alive))

        parameter = run.model.tied.weight
        before = parameter.detach().clone()
        for each in run.model.parameters():
            if each.requires_grad:
                each.register_hook(lambda g: alive.append(weakref.ref(g)))
                each.register_post_accumulate_grad_hook(count)
        run.backward(0)
        assert not torch.equal(parameter, before)
        gc.collect()
        optimizer = run.optimizer
        # Those of subgroups of which another parameter takes no part in the loss wait for step().
        assert all(not isinstance(p.grad, type(None)) for p in [run.model.tied.weight])
        optimizer.step()
        gc.collect()
        assert sum(reference() is not None for reference in alive) == 0


@pytest.mark.parametrize("by", ["optimizer", "next backward"])
def test_a_backward_without_a_step_is_an_error(by: str, disk: Path) -> None:
    """A loss of another optimizer's, a step that is skipped, a pass that failed."""
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        run.backward(0)
        if by == "next backward":
            run.model.zero_grad()
        clear = {"optimizer": run.optimizer.zero_grad, "next backward": lambda: run.backward(1)}
        with pytest.raises(OffloadError, match=r"no step\(\) followed"):
            clear[by]()
        # Raised once: training may go on.
        run.model.zero_grad()
        run.backward(1)
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_backward_that_fails_leaves_no_gradient_behind(disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        handle = run.model.first.weight.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.backward(0)
        handle.remove()
        with pytest.raises(OffloadError, match="last checkpoint"):
            run.optimizer.zero_grad()
        run.optimizer.zero_grad()
        run.backward(1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert all(p.grad is None for p in run.model.parameters())
        engine._resources.store.wait_for_writes()
        assert engine._resources.pool.usage().lent_bytes == 0


def test_state_dicts_between_steps(disk: Path) -> None:
    def script(run: Run) -> None:
        for number in range(3):
            run.optimizer.zero_grad()
            run.backward(number)
            run.optimizer.step()
            run.note()
        saved = deepcopy(run.optimizer.state_dict())  # the plain one goes on with these tensors
        for number in range(3, 5):
            run.optimizer.zero_grad()
            run.backward(number)
            run.optimizer.step()
        run.optimizer.load_state_dict(saved)
        for number in range(3):
            run.optimizer.zero_grad()
            run.backward(number)
            run.optimizer.step()
            run.note()

    compare(script, OPTIMIZERS["AdamW"], disk, "eager")
