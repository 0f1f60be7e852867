"""Items wait for each other on their way to the store, and nobody can tell."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.activations.tier_writes import TierWrites
from tests.activations.support import Calls, X
from tests.training import assert_same_bits, gradients

#: So many items of 256 bytes are saved by a pass, of which 7 % may wait.
ITEMS, TOGETHER = 200, 15


def tickets(engine: OffloadEngine) -> int:
    return engine._resources.store.live_tickets


class Chain:
    """A chain of sines, each of which saves its input; `look` is called after every one."""

    def __init__(self) -> None:
        self.look: Callable[[int], object] = lambda number: None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        value = X @ weight
        for number in range(ITEMS):
            value = value.sin()
            self.look(number)
        return value.sum()


@pytest.fixture
def model(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A model whose first pass is behind it: how much it saves is known."""
    # On a busy machine tiny writes are so slow that batches would be smaller.
    monkeypatch.setattr(TierWrites, "rate", lambda *_, **__: None)
    model = Calls(Chain())
    engine.attach(model)
    seen: list[int] = []
    model.function.look = lambda number: seen.append(tickets(engine))
    step(model)
    # Nothing is known of the first pass, so every item leaves when the next operation saves one.
    assert seen == list(range(1, ITEMS + 1))  # X is the first
    model.function.look = lambda number: None
    return model


def step(model: Calls) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model()
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    return step(Calls(Chain()))


def test_as_many_wait_as_are_a_small_share_of_a_pass(
    engine: OffloadEngine, model: Calls, expected: dict[str, torch.Tensor]
) -> None:
    seen: list[int] = []
    model.function.look = lambda number: seen.append(tickets(engine))
    assert_same_bits(step(model), expected)
    assert seen[-1] >= ITEMS - TOGETHER
    assert {after - before for before, after in itertools.pairwise(seen)} == {0, TOGETHER}
    gc.collect()
    assert tickets(engine) == 0


def test_what_dies_while_it_waits_is_never_given(engine: OffloadEngine, model: Calls) -> None:
    known = tickets(engine)
    with engine.forward():
        dead = (X.clone().requires_grad_() * 2).sin()
        del dead
        gc.collect()
    assert tickets(engine) == known


def test_an_engine_that_is_closed_in_the_middle_of_a_pass_keeps_what_waits(
    engine: OffloadEngine, model: Calls
) -> None:
    model.zero_grad()
    with engine.forward():
        loss = (model.weight * 2).sin().sum()
        engine.close()
    loss.backward()
    assert torch.equal(model.weight.grad, (model.weight * 2).cos() * 2)
