"""Clipping and loss scaling without giving up updates that run ahead of the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import AdamW

from tests.optimizer.runs import (
    MakeOptimizer,
    Run,
    Script,
    adamw,
    compare,
    let_gradients_leave,
    loss_of,
)
from tests.training import in_turn

STEPS = 14


Clip = Callable[[nn.Module, int], object]


def _train(run: Run, clip: Clip) -> None:
    for number in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.backward(number)
        seen = clip(run.model, number)
        run.optimizer.step()
        run.note(loss)
        if isinstance(seen, torch.Tensor):
            run.history[-1]["seen"] = seen.detach().clone()


@pytest.fixture(params=["memory", "disk"])
def place(request: pytest.FixtureRequest, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where gradients wait for `step()`."""
    if request.param == "disk":
        let_gradients_leave(monkeypatch)
    return disk


def _steps_ahead(make: MakeOptimizer, script: Script, *where: Any) -> tuple[float, float]:
    """Train with and without offload; returns the steps that ran ahead, and those in vain."""
    metrics = compare(script, make, *where)
    return (
        metrics["offload/optimizer/speculated_steps"],
        metrics["offload/optimizer/redone_steps"],
    )


NEVER: dict[str, Clip] = {
    "norm": lambda m, _: clip_grad_norm_(m.parameters(), 1e9),
    "largest value": lambda m, _: clip_grad_norm_(m.parameters(), 1e9, norm_type=float("inf")),
    "a factor of one": lambda m, _: [
        p.grad.mul_(1.0) for p in m.parameters() if p.grad is not None
    ],
    "read": lambda m, _: torch.stack([p.grad.sum() for p in m.parameters() if p.grad is not None]),
}


ALWAYS_THE_SAME: dict[str, Clip] = {
    "by value": lambda m, _: clip_grad_value_(m.parameters(), 1e-3),
    "halved": lambda m, _: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
    "divided": lambda m, _: [p.grad.div_(3) for p in m.parameters() if p.grad is not None],
}


@pytest.mark.parametrize(
    ("name", "place"), in_turn({**NEVER, **ALWAYS_THE_SAME}, ["memory", "disk"]), indirect=["place"]
)
def test_limits_that_never_bite_cost_no_update_and_what_is_always_the_same_is_foreseen(
    name: str, place: Path
) -> None:
    clip = {**NEVER, **ALWAYS_THE_SAME}[name]
    ahead, redone = _steps_ahead(adamw, lambda run: _train(run, clip), place)
    assert redone == (name in ALWAYS_THE_SAME)
    assert ahead >= STEPS - 4 if redone else ahead == STEPS


def test_a_limit_that_bites_now_and_then_is_paid_for_then_alone(place: Path) -> None:
    bites = (7, 13)

    def clip(model: nn.Module, number: int) -> object:
        return clip_grad_norm_(model.parameters(), 1e-4 * number if number in bites else 1e9)

    ahead, redone = _steps_ahead(adamw, lambda run: _train(run, clip), place)
    assert (ahead, redone) == (STEPS, len(bites))


def test_a_limit_that_always_bites_switches_running_ahead_off(disk: Path) -> None:
    def clip(model: nn.Module, number: int) -> object:
        return clip_grad_norm_(model.parameters(), 1e-3 * (number + 1))

    ahead, redone = _steps_ahead(adamw, lambda run: _train(run, clip), disk)
    assert (ahead, redone) == (1, 1)


@pytest.mark.parametrize(
    ("overlap", "clip", "overflows", "place"),
    [
        ("commit", None, (0, 1, 9), "memory"),
        ("commit", 1e-3, (3,), "memory"),
        ("commit", 1e-3, (3,), "disk"),
        ("commit", 1e9, (0, 1, 9), "disk"),
        ("off", 1e-3, (3,), "memory"),
    ],
    indirect=["place"],
)
def test_loss_scaling_with_overflows(
    overlap: str, overflows: tuple[int, ...], clip: float | None, place: Path
) -> None:
    def train(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for number in range(STEPS):
            run.optimizer.zero_grad()
            loss = loss_of(run.model, number)
            scaler.scale(loss).backward()
            if number in overflows:
                gradient = run.model.first.weight.grad
                assert gradient is not None
                gradient[0, 0] = float("inf")
            if clip is not None:
                scaler.unscale_(run.optimizer)
                clip_grad_norm_(run.model.parameters(), clip)
            scaler.step(run.optimizer)
            scaler.update()
            run.note(loss)
            run.history[-1]["scale"] = torch.tensor(scaler.get_scale())

    # Not the fused kernel, which unscales by itself: it leaves other gradients where it skips.
    def make(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), 1e-2)

    ahead, redone = _steps_ahead(make, train, place, overlap)
    if overlap == "commit" and clip != 1e-3:
        assert redone < ahead <= STEPS
