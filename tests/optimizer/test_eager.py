"""``overlap: eager``: weights change during backward, and gradients are gone after it."""

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


def _note(run: Run, loss: torch.Tensor | None = None) -> None:
    """Between steps: what gradients there were is seen by nobody."""
    run.optimizer.zero_grad()
    run.note(loss)


def _loop(run: Run) -> None:
    for number in range(6):
        _note(run)
        # Torch itself fails where the first gradient of a parameter comes late for this one.
        late = not getattr(run.optimizer, "defaults", {}).get("fused") and number >= 3
        loss = run.backward(number, extra=late)
        run.optimizer.step()
        _note(run, loss)


def _accumulate(run: Run) -> None:
    number = 0
    for micro_batches in (3, 1, 4, 2):
        for index in range(micro_batches):
            run.hint(index, last=index == micro_batches - 1)
            (loss_of(run.model, number) / micro_batches).backward()
            number += 1
        run.optimizer.step()
        _note(run)


def _scheduled(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=8)
    for number in range(6):
        run.backward(number)
        run.optimizer.step()
        scheduler.step()
        _note(run)


def _zeroed_not_dropped(run: Run) -> None:
    for number in range(5):
        run.optimizer.zero_grad(set_to_none=False)
        run.backward(number)
        run.optimizer.step()
    _note(run)


def _by_the_model(run: Run) -> None:
    for number in range(5):
        run.model.zero_grad()
        run.backward(number)
        run.optimizer.step()
    _note(run)


def _frozen_for_a_while(run: Run) -> None:
    for number in range(6):
        run.model.first.weight.requires_grad_(number not in (2, 3))
        run.backward(number)
        run.optimizer.step()
        _note(run)


def _closure(run: Run) -> None:
    for number in range(4):

        def closure(number: int = number) -> torch.Tensor:
            run.optimizer.zero_grad()
            return run.backward(number)

        loss = run.optimizer.step(closure)
        _note(run, torch.as_tensor(loss))


def _gradient_by_hand(run: Run) -> None:
    for number in range(4):
        run.backward(number)
        run.model.unused.weight.grad = torch.full((3, 3), 0.5)
        run.optimizer.step()
        _note(run)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of(name: str, disk: Path) -> None:
    compare(_loop, OPTIMIZERS[name], disk, "eager")


@pytest.mark.parametrize("host", ["1KiB", "3KiB", "1MiB"])
def test_partly_in_host_memory(host: str, disk: Path) -> None:
    compare(_loop, OPTIMIZERS["AdamW fused"], disk, "eager", host)


@pytest.mark.parametrize(
    "script",
    [
        _accumulate,
        _scheduled,
        _zeroed_not_dropped,
        _by_the_model,
        _frozen_for_a_while,
        _closure,
        _gradient_by_hand,
    ],
)
def test_the_same_numbers_with(script: Callable[[Run], None], disk: Path) -> None:
    compare(script, OPTIMIZERS["AdamW"], disk, "eager")


READS: dict[str, Callable[[nn.Module], object]] = {
    "clip by norm": lambda m: clip_grad_norm_(m.parameters(), 1.0),
    "clip by norm, without a limit": lambda m: clip_grad_norm_(m.parameters(), float("inf")),
    "clip by value": lambda m: clip_grad_value_(m.parameters(), 1e9),
    "scale by one": lambda m: [p.grad.mul_(1.0) for p in m.parameters() if p.grad is not None],
    "log a norm": lambda m: m.first.weight.grad.norm(),
    "print a value": lambda m: m.first.weight.grad[0, 0].item(),
    "data": lambda m: m.first.weight.grad.data.sum(),
    "numpy": lambda m: m.first.weight.grad.numpy(),
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


def test_what_can_be_told_without_values_is_told(disk: Path) -> None:
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
def test_a_backward_that_no_step_follows_is_told(by: str, disk: Path) -> None:
    """A loss of another optimizer's, a step that is skipped, a pass that failed."""
    with offloading(disk, "eager") as engine:
        run = Run(OPTIMIZERS["AdamW"], engine)
        run.backward(0)
        if by == "next backward":
            run.model.zero_grad()
        clear = {"optimizer": run.optimizer.zero_grad, "next backward": lambda: run.backward(1)}
        with pytest.raises(OffloadError, match=r"no step\(\) followed"):
            clear[by]()
        # Told once: whoever knows what they do may go on.
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
            run.backward(number)
            run.optimizer.step()
            _note(run)
        saved = deepcopy(run.optimizer.state_dict())  # the plain one goes on with these tensors
        for number in range(3, 5):
            run.backward(number)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.optimizer.load_state_dict(saved)
        for number in range(3):
            run.backward(number)
            run.optimizer.step()
            _note(run)

    compare(script, OPTIMIZERS["AdamW"], disk, "eager")
