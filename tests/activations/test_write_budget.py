"""A budget of bytes a day is kept by moving less, on a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.activations import write_budget
from offload_strategy.config import OffloadConfig
from offload_strategy.engine import metrics as engine_metrics
from tests.training import Block, Numbers, assert_same_history, attached, on_disk, settings, weights

STEP_SECONDS = 60.0
STEPS = 40


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    for module in (write_budget, engine_metrics):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def train(
    engine: OffloadEngine | None, clock: list[float], steps: int = STEPS
) -> tuple[list[Numbers], list[tuple[int, int]]]:
    """Numbers of each step, and what activations and states have written by its end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)))
    optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-3))
    found: list[Numbers] = []
    written = []
    for step in range(steps):
        torch.manual_seed(step)
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


def config(disk: Path, per_step: float | None, host: str | None = None) -> dict[str, Any]:
    made = settings(disk, host, optimizer={"overlap": "off"})
    if per_step is not None:
        made["tiers"][-1]["writes_per_day"] = int(per_step * 86400 / STEP_SECONDS)
    return made


def unlimited(disk: Path, clock: list[float]) -> tuple[list[Numbers], int, int]:
    """The numbers of plain training, and what a step writes of activations and of states."""
    expected, _ = train(None, clock)
    with OffloadEngine(config(disk, None)) as engine:
        _, written = train(engine, clock, 3)
    (before, states_before), (after, states_after) = written[-2:]
    assert after - before > states_after - states_before > 0, "what is measured below shows"
    return expected, after - before, states_after - states_before


def test_a_budget_for_half_of_the_activations_is_kept_from_the_first_steps_on(
    disk: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    expected, activations, states = unlimited(disk, clock)
    per_step = states + activations / 2
    with OffloadEngine(config(disk, per_step)) as engine:
        begun = clock[0]
        got, written = train(engine, clock)
        assert_same_history(got, expected)
        for step, of_clients in enumerate(written[9:], start=10):
            assert sum(of_clients) <= 1.05 * step * per_step, step
        total = sum(written[-1])
        assert total >= 0.95 * STEPS * per_step, "what the budget allows is used"
        assert clock[0] == begun + STEPS * STEP_SECONDS
        per_day = engine.metrics()["offload/endurance/written_bytes_per_day"]
        assert per_day == pytest.approx(per_step * 86400 / STEP_SECONDS, rel=0.05)
    assert "writes_per_day" not in caplog.text


def test_states_that_exceed_the_budget_go_on_and_the_run_is_told_once_after_an_hour(
    disk: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    expected, activations, states = unlimited(disk, clock)
    with OffloadEngine(config(disk, states / 4)) as engine:
        got, written = train(engine, clock, 20)
        # After 20 of 60 minutes, what an hour may write is used up.
        told = [record.message for record in caplog.records if "writes_per_day" in record.message]
        assert len(told) == 1
        assert told[0].startswith("tier nvme: this run has written")
        assert "cannot be kept" in told[0]
    assert_same_history(got[:-1], expected[:20])
    assert written[0][0] == written[-1][0] == activations, "none but those of the first pass"


def test_what_a_dram_tier_takes_needs_no_budget(disk: Path, clock: list[float]) -> None:
    expected, _, _ = unlimited(disk, clock)
    with OffloadEngine(config(disk, 1, host="1MiB")) as engine:
        got, written = train(engine, clock)
        assert engine.metrics()["offload/activations/step_left_bytes"] > 0
    assert_same_history(got, expected)
    assert written[-1] == (0, 0)


@pytest.mark.parametrize(("room", "leaves"), [(True, False), (False, True)])
def test_without_room_in_memory_an_item_leaves_beyond_the_budget(
    disk: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, room: bool, leaves: bool
) -> None:
    may_stay: Callable[..., bool] = lambda budget, trace: room  # noqa: E731
    with OffloadEngine(config(disk, 1)) as engine:
        assert engine._activations is not None
        monkeypatch.setattr(type(engine._activations._budget), "may_stay", may_stay)
        _, written = train(engine, clock, 4)
    assert (written[-1][0] > written[0][0]) == leaves


def test_processes_share_the_budget_of_a_tier(disk: Path) -> None:
    shared = OffloadConfig.load(config(disk, 1000)).divided(4)
    whole = OffloadConfig.load(config(disk, 1000)).tiers[0].writes_per_day
    assert whole is not None
    assert shared.tiers[0].writes_per_day == whole // 4
