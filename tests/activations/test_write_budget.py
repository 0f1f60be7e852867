"""A budget of bytes a day is kept by moving less, on a clock that only the test moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadConfig, OffloadEngine
from offload_strategy.activations import write_budget
from offload_strategy.activations.budgets import Budget
from offload_strategy.engine import metrics as engine_metrics
from tests.training import Block, Numbers, attached, on_disk, same_with_and_without, settings

STEP_SECONDS = 60.0


class Training:
    """Steps of a minute each, and what activations and states have written by the end of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.steps, self.written = 1000.0, 3, list[tuple[int, int]]()
        for module in (write_budget, engine_metrics):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def __call__(self, engine: OffloadEngine | None) -> list[Numbers]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(16) for _ in range(4)))
        optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-3))
        found: list[Numbers] = []
        for _ in range(self.steps):
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
                self.written.append(
                    (moved["activations", "written"], moved["optimizer", "written"])
                )
            self.now += STEP_SECONDS
        return found


def config(disk: Path, per_step: float | None, host: str | None = None) -> dict[str, Any]:
    made = settings(disk, host, optimizer={"overlap": "off"})
    if per_step is not None:
        made["tiers"][-1]["writes_per_day"] = int(per_step * 86400 / STEP_SECONDS)
    return made


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(monkeypatch)


@pytest.fixture
def step(disk: Path, training: Training) -> tuple[int, int]:
    """What a step writes without a budget, of activations and of states."""
    same_with_and_without(training, config(disk, None))
    activations, states = (b - a for a, b in zip(*training.written[-2:], strict=True))
    assert activations > states > 0, "what is measured below shows"
    training.written.clear()
    return activations, states


def test_a_budget_for_half_of_the_activations_is_kept_from_the_first_steps_on(
    disk: Path, training: Training, step: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    per_step, training.steps = step[1] + step[0] / 2, 40
    metrics = same_with_and_without(training, config(disk, per_step))
    for count, written in enumerate(training.written[9:], start=10):
        assert 0.95 <= sum(written) / (count * per_step) <= 1.05, count
    per_day = metrics["offload/endurance/written_bytes_per_day"]
    assert per_day == pytest.approx(per_step * 86400 / STEP_SECONDS, rel=0.05)
    assert "writes_per_day" not in caplog.text


@pytest.mark.parametrize("has_room", [True, False], ids=["room", "no room"])
def test_what_must_move_goes_on_and_the_run_is_told_once_after_an_hours_worth(
    disk: Path,
    training: Training,
    step: tuple[int, int],
    has_room: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activations, states = step
    monkeypatch.setattr(Budget, "may_stay", lambda *_: has_room)
    training.steps = 20
    same_with_and_without(training, config(disk, states / 4))
    (told,) = [one.message for one in caplog.records if "writes_per_day" in one.message]
    assert told.startswith("tier nvme: this run has written")
    assert "cannot be kept" in told
    assert training.written[-1] == (activations * (1 if has_room else 20), 20 * states)


def test_a_dram_tier_needs_no_budget_and_processes_share_it(disk: Path, training: Training) -> None:
    limited = OffloadConfig.load(config(disk, 1000, host="1MiB"))
    metrics = same_with_and_without(training, limited)
    assert metrics["offload/activations/step_left_bytes"] > 0
    assert training.written[-1] == (0, 0)
    shared, whole = limited.divided(4).tiers[-1].writes_per_day, limited.tiers[-1].writes_per_day
    assert shared == (whole or 0) // 4
