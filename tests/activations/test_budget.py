"""How much may leave: fixed amounts, and what a path can hide."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy.activations.budgets import ALLOWANCE, AutomaticBudget, Budget
from offload_strategy.activations.forward_records import Trace
from offload_strategy.units import GiB, MiB
from tests.training import activations_only, assert_same_bits, gradients


@dataclass
class Path_:
    """A path that takes what it is told to."""

    waiting: int = 0
    write: float | None = None
    read: float | None = None
    memory: int = 0
    waits: list[tuple[int, float]] = field(default_factory=list)
    clears: bool = False

    def writing_bytes(self) -> int:
        return self.waiting

    def rate(self, *, write: bool) -> float | None:
        return self.write if write else self.read

    def has_room_in_memory(self, nbytes: int) -> bool:
        return nbytes <= self.memory

    def await_writing_at_most(self, nbytes: int, seconds: float) -> float:
        self.waits.append((nbytes, seconds))
        if self.clears:
            self.waiting = min(self.waiting, nbytes)
        return 0.0


def step(saved: int, left: int, seconds: float = 10.0, waited: float = 0.0) -> Trace:
    """A step that is over."""
    trace = Trace()
    trace.started_at = 0.0
    trace.saved_bytes, trace.left_bytes, trace.waited = saved, left, waited
    trace.uses = [(0, seconds, waited)]
    return trace


def offer(budget: AutomaticBudget, nbytes: int, trace: Trace, idle: float | None = None) -> bool:
    """As the pack hook does."""
    trace.saved_bytes += nbytes
    if budget.admits(nbytes, trace, idle):
        trace.left_bytes += nbytes
        return True
    return False


@pytest.mark.parametrize(
    ("budget", "expected"), [(None, 10), (0, 0), (35, 3), (0.5, 5), (1.0, 10), (0.0, 0)]
)
def test_fixed_amounts(budget: int | float | None, expected: int) -> None:
    fixed, trace = Budget(budget), Trace()
    left = 0
    for _ in range(10):
        trace.saved_bytes += 10
        if fixed.admits(10, trace, None):
            trace.left_bytes += 10
            left += 1
    assert left == expected


def test_all_leaves_where_the_path_keeps_pace() -> None:
    budget, trace = AutomaticBudget(Path_(), GiB), Trace()
    assert all(offer(budget, 10 * MiB, trace) for _ in range(100))


def test_a_path_that_is_behind_gets_no_more() -> None:
    path = Path_()
    budget, trace = AutomaticBudget(path, GiB), Trace()
    assert offer(budget, 10 * MiB, trace)
    path.waiting = 60 * MiB
    assert not offer(budget, 10 * MiB, trace)
    assert path.waits == []  # nothing is known yet of how long a step takes
    path.waiting = 50 * MiB
    assert offer(budget, 10 * MiB, trace)


def test_a_little_may_be_waited_for_once_the_time_of_a_step_is_known() -> None:
    path = Path_(clears=True)
    budget = AutomaticBudget(path, GiB)
    budget.learn(step(GiB, GiB, seconds=10.0))
    trace = Trace()
    assert offer(budget, 10 * MiB, trace)
    path.waiting = 500 * MiB
    assert offer(budget, 10 * MiB, trace)
    ((_, seconds),) = path.waits
    assert seconds == pytest.approx(10.0 * ALLOWANCE)


def test_host_memory_takes_whatever_the_path_is_doing() -> None:
    path = Path_(waiting=GiB, memory=MiB)
    budget, trace = AutomaticBudget(path, 16 * MiB), Trace()
    assert offer(budget, MiB, trace)
    assert not offer(budget, 2 * MiB, trace)
    # What waits to be written is bounded by the memory that is allowed.
    budget.learn(step(GiB, GiB))
    path.waiting, path.memory = 20 * MiB, 0
    assert not offer(budget, MiB, Trace())


def test_what_is_used_soon_stays() -> None:
    path = Path_(write=100 * MiB, read=100 * MiB)
    budget = AutomaticBudget(path, GiB)
    budget.learn(step(GiB, GiB, seconds=10.0))
    trace = Trace()
    assert not offer(budget, 10 * MiB, trace, idle=0.1)  # out and back take 0.2 s
    assert offer(budget, 10 * MiB, trace, idle=0.3)
    assert offer(budget, 10 * MiB, trace, idle=None)
    path.write = path.read = 1.0  # a path that was slow once is tried again
    assert offer(budget, 10 * MiB, Trace(), idle=1.5)


@pytest.mark.parametrize(
    ("read", "passes"),
    [
        # 1.1 s of 10 s: one second too many, in which the path reads 100 MiB; then more again.
        (100, [(1000, 1.1, 90), (900, 0, 92), (900, 0, 96), (900, 0, 100), (900, 0, 100)]),
        # Two seconds, in which the path could have read all of it: one late pass may be chance (it
        # paused), two are not (it is too slow). Then the limit begins to grow anew.
        (1000, [(1000, 2, 80), (800, 2, 0), (0, 0, 2), (20, 2, 1), (10, 0, 3)]),
    ],
)
def test_less_leaves_after_a_backward_that_waited_and_more_again_later(
    read: int, passes: list[tuple[int, float, int]]
) -> None:
    """Each pass: MiB that left, seconds that it waited, and items that may leave next time."""
    budget = AutomaticBudget(Path_(read=float(read * MiB)), GiB)
    for left, waited, expected in passes:
        budget.learn(step(1000 * MiB, left * MiB, seconds=10.0, waited=waited))
        trace = Trace()
        assert sum(offer(budget, 10 * MiB, trace) for _ in range(100)) == expected


def test_the_amount_is_told_once_when_it_has_settled(caplog: pytest.LogCaptureFixture) -> None:
    budget = AutomaticBudget(Path_(), GiB)
    with caplog.at_level(logging.INFO, logger="offload_strategy"):
        for _ in range(10):
            budget.learn(step(1000 * MiB, 300 * MiB))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "300 MiB of 1000 MiB" in told


def test_numbers_are_the_same_and_figures_tell_what_left(disk: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    x = torch.randn(256, 64)
    model(x).sum().backward()
    expected = gradients(model)
    with activations_only(disk, budget="auto") as engine:
        engine.attach(model)
        for _ in range(4):
            model.zero_grad()
            model(x).sum().backward()
            assert_same_bits(gradients(model), expected)
        metrics = engine.metrics()
    prefix = "offload/activations"
    saved, left = (metrics[f"{prefix}/step_{what}_bytes"] for what in ("saved", "left"))
    assert 0 <= left <= saved == 5 * 256 * 64 * 4
    assert metrics[f"{prefix}/kept_bytes"] >= 0
