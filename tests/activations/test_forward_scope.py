"""Where offload begins and ends: calls of a model, scopes, threads, hooks around and inside."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from tests.activations.support import Calls, X, compare, noise
from tests.training import assert_same_bits, bits, gradients, moved, on_disk


def test_a_scope_covers_work_outside_of_the_model(engine: OffloadEngine) -> None:
    model = nn.Linear(8, 8)
    x, target = noise(4, 8), noise(4, 8, seed=9)

    def run(scope: Any) -> torch.Tensor:
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).exp(), target.softmax(1))
        on_disk(engine)
        loss.backward()
        return loss

    plain = run(nullcontext())
    expected = gradients(model)
    engine.attach(model)
    run(nullcontext())
    without = moved(engine)
    assert bits(run(engine.forward())) == bits(plain)
    assert_same_bits(gradients(model), expected)
    assert moved(engine) - without > without


def test_activations_leave_in_eval_mode_if_gradients_are_recorded(engine: OffloadEngine) -> None:
    """As with frozen batch norms, and with adapters on a frozen base."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)).eval()
    model[0].requires_grad_(False)
    compare(engine, model, lambda: model(noise(4, 8)).sum())


# ---------------------------------------------------------------------- when nothing leaves
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "no gradients"])
def test_nothing_leaves_when_nothing_is_trained(engine: OffloadEngine, how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = noise(4, 8)
    expected = model(x)
    engine.attach(model)
    if how == "no gradients":
        model.requires_grad_(False)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, nullcontext)():
        assert torch.equal(model(x), expected)
        with engine.forward():
            pass
    assert moved(engine) == moved(engine, verb="forwarded") == 0
    assert engine._resources.store.live_tickets == 0


def test_a_call_that_never_began_ends_no_other(engine: OffloadEngine) -> None:
    """A hook before ours refuses the inner of two calls of one module; the outer goes on."""
    depth = 0

    def refuse_the_inner(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 2:
            raise ValueError("too deep")

    def function(w: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="too deep"):
            model()
        return (w * 2).exp().sum()  # saved after the inner call

    model = Calls(function)
    engine.attach(model)
    model.register_forward_pre_hook(refuse_the_inner, prepend=True)
    loss = model()
    on_disk(engine)
    assert moved(engine) == 8 * 8 * 4
    loss.backward()


# ---------------------------------------------------------------------- threads
def test_two_threads_may_run_the_same_model(engine: OffloadEngine) -> None:
    """One trains in the middle of its forward while the other evaluates, begins and ends."""
    inside, resume = threading.Event(), threading.Event()

    def function(w: torch.Tensor, pause: bool) -> torch.Tensor:
        y = (X @ w).exp()
        if pause:
            inside.set()
            resume.wait(30)
        return y.sin().sum()

    model = Calls(function)
    model(False).backward()
    expected = gradients(model)
    model.zero_grad()
    engine.attach(model)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            loss = model(True)
            on_disk(engine)
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert inside.wait(30)
    with torch.no_grad():
        model(False)
    other = model(False)
    resume.set()
    thread.join(30)
    assert errors == []
    assert_same_bits(gradients(model), expected)
    model.zero_grad()
    other.backward()
    assert_same_bits(gradients(model), expected)
    assert moved(engine) > 0
