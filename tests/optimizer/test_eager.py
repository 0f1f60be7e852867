"""``overlap: eager``: gradients are gone after backward; test_exactness.py compares numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from offload_strategy.errors import OffloadError
from tests.optimizer.runs import Run, adamw, compare, loss_of, offloading, steps


def _scale_a_loss(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(loss_of(run.model, 1))
    scaler.step(run.optimizer)


#: What reads or changes gradients by another way; `gradients/test_consumed.py` has the operators.
REFUSED: dict[str, Callable[[Run], object]] = {
    "clip by norm": lambda run: clip_grad_norm_(run.model.parameters(), 1.0),
    "clip by value": lambda run: clip_grad_value_(run.model.parameters(), 1e9),
    "a loss scaler": _scale_a_loss,
    "a second backward": lambda run: run.backward(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_that_were_used_are_refused_from_the_first_step(name: str, disk: Path) -> None:
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
        run.backward(0)
        assert "consumed" in repr(run.model.first.weight.grad)
        weights = [p.detach().clone() for p in run.model.parameters()]
        with pytest.raises(OffloadError, match=r"optimizer\.overlap: commit"):
            REFUSED[name](run)
        assert all(map(torch.equal, weights, run.model.parameters()))


def test_weights_change_during_backward_and_gradients_are_freed(disk: Path) -> None:
    with offloading(disk, "eager", host="1MiB") as engine:
        run = Run(adamw, engine)
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        parameter = run.model.tied.weight
        before = parameter.detach().clone()
        for each in run.model.parameters():
            if each.requires_grad:
                each.register_hook(lambda g: alive.append(weakref.ref(g)))
        run.backward(0)
        assert not torch.equal(parameter, before)
        # Those of subgroups of which another parameter takes no part in the loss wait for step().
        run.optimizer.step()
        gc.collect()
        assert sum(reference() is not None for reference in alive) == 0


@pytest.mark.parametrize("by", ["optimizer", "next backward"])
def test_a_backward_without_a_step_is_an_error(by: str, disk: Path) -> None:
    """A loss of another optimizer's, a step that is skipped, a pass that failed."""
    with offloading(disk, "eager") as engine:
        run = Run(adamw, engine)
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
        run = Run(adamw, engine)
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
        steps(run, 3)
        saved = deepcopy(run.optimizer.state_dict())  # the plain one goes on with these tensors
        steps(run, 2, start=3)
        run.optimizer.load_state_dict(saved)
        steps(run, 3)

    compare(script, adamw, disk, "eager")
