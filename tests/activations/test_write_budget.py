"""A budget of bytes a day is kept by moving less, on a clock that only the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.activations import write_budget
from offload_strategy.activations.budgets import Budget
from offload_strategy.engine import metrics as engine_metrics
from tests.training import Block, Numbers, assert_same_history, attached, on_disk, settings, weights

STEP_SECONDS = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    for module in (write_budget, engine_metrics):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def train(
    engine: OffloadEngine | None, clock: list[float], steps: int
) -> tuple[list[Numbers], list[tuple[int, int]]]:
    """Numbers of each step, and what activations and states have written by its end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-3))
    found: list[Numbers] = []
    written = []
    for _ in range(steps):
        loss = model(torch.randn(8, 16, 16)).square().mean()
        if engine is not None:
            on_disk(engine)  # a write that backward comes before is cancelled
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": loss.detach()})
        if engine is not None:
            on_disk(engine)
            moved = engine._recorder.client_bytes
            written.append((moved["activations", "written"], moved["optimizer", "written"]))
        clock[0] += STEP_SECONDS
    return [*found, weights(model)], written


def engine(disk: Path, per_step: float | None, host: str | None = None) -> OffloadEngine:
    made = settings(disk, host, optimizer={"overlap": "off"})
    if per_step is not None:
        made["tiers"][-1]["writes_per_day"] = int(per_step * 86400 / STEP_SECONDS)
    return OffloadEngine(made)


@pytest.fixture
def step(disk: Path, clock: list[float]) -> tuple[int, int]:
    """What a step writes without a budget, of activations and of states."""
    with engine(disk, None) as unlimited:
        _, written = train(unlimited, clock, 3)
    activations, states = (after - before for before, after in zip(*written[-2:], strict=True))
    assert activations > states > 0, "what is measured below shows"
    return activations, states


def test_a_budget_for_half_of_the_activations_is_kept_from_the_first_steps_on(
    disk: Path, clock: list[float], step: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    activations, states = step
    per_step = states + activations / 2
    with engine(disk, per_step) as limited:
        got, written = train(limited, clock, 40)
        per_day = limited.metrics()["offload/endurance/written_bytes_per_day"]
    assert_same_history(got, train(None, clock, 40)[0])
    for count, of_clients in enumerate(written[9:], start=10):
        assert 0.95 <= sum(of_clients) / (count * per_step) <= 1.05, count
    assert per_day == pytest.approx(per_step * 86400 / STEP_SECONDS, rel=0.05)
    assert "writes_per_day" not in caplog.text


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_what_must_move_goes_on_and_the_run_is_told_once_after_an_hours_worth(
    disk: Path,
    clock: list[float],
    step: tuple[int, int],
    has_room: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activations, states = step
    monkeypatch.setattr(Budget, "may_stay", lambda *_: has_room)
    with engine(disk, states / 4) as limited:
        got, written = train(limited, clock, 20)
    (told,) = [one.message for one in caplog.records if "writes_per_day" in one.message]
    assert told.startswith("tier nvme: this run has written")
    assert "cannot be kept" in told
    assert_same_history(got, train(None, clock, 20)[0])
    assert written[-1] == (activations * (1 if has_room else 20), 20 * states)


def test_a_dram_tier_needs_no_budget_and_processes_share_one(
    disk: Path, clock: list[float]
) -> None:
    with engine(disk, 1000, host="1MiB") as limited:
        _, written = train(limited, clock, 4)
        assert limited.metrics()["offload/activations/step_left_bytes"] > 0
        shared = limited.config.divided(4).tiers[-1].writes_per_day
        assert shared == (limited.config.tiers[-1].writes_per_day or 0) // 4
    assert written[-1] == (0, 0)
