"""The plan of a step: every byte that moves is there once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.plan_runtime.weight_schedule import BlockPass, weight_schedule
from tests.training import settings
from tests.weights.support import streaming


def passes(blocks: int, weights: int = 10, states: int = 20) -> list[BlockPass]:
    names = [f"block {number}" for number in range(blocks)]
    forward = [BlockPass(name, False, weights, weights, states) for name in names]
    return forward + [BlockPass(name, True, weights, weights, states) for name in reversed(names)]


@pytest.mark.parametrize("blocks_in_flight", [1, 2, 3])
def test_what_is_read_and_written(blocks_in_flight: int) -> None:
    plan = weight_schedule(passes(6), blocks_in_flight, learned=True, updates=True)
    assert plan.written_bytes == 6 * 30
    # What the end of forward has left is not read again for backward, nor the other way round.
    assert plan.read_bytes == 6 * 20 + 2 * (6 - blocks_in_flight) * 10


def test_while_a_block_computes_the_next_is_read_and_the_last_is_written() -> None:
    plan = weight_schedule(passes(4), 2, learned=True, updates=True)
    row = plan.rows[6]
    assert row.block_pass.block == "block 1"
    assert row.block_pass.backward
    assert row.read_ahead == ("block 0",)
    assert row.written == "block 2"
    assert row.read_bytes == 10 + 20
    assert row.written_bytes == 30


def test_without_updates_in_backward_and_for_frozen_blocks_only_weights_are_read() -> None:
    plan = weight_schedule(passes(4), 2, learned=True, updates=False)
    assert (plan.read_bytes, plan.written_bytes) == (2 * 2 * 10, 0)
    frozen = [BlockPass(block_pass.block, block_pass.backward, 10) for block_pass in passes(4)]
    assert weight_schedule(frozen, 2, learned=True, updates=True).written_bytes == 0
    assert weight_schedule([], 2, learned=False, updates=True).rows == ()


def test_an_engine_tells_its_plan_and_keeps_to_it(disk: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with streaming(disk, optimizer={"overlap": "eager"}) as engine:
        optimizer = engine.attach(model, torch.optim.Adam(model.parameters()))
        before = engine.plan()
        assert not before.learned
        assert "| forward | 0 | " in str(before)
        assert "no step was seen yet" in str(before)
        moves = []
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine._resources.store.wait_for_writes()
            metrics = engine.metrics()
            moves.append(
                {
                    verb: sum(
                        metrics[f"offload/{client}/{verb}_bytes"]
                        for client in ("parameters", "optimizer")
                    )
                    for verb in ("read", "forwarded", "written")
                }
            )
        plan = engine.plan()
    assert plan.learned
    assert "as in the last step" in str(plan)
    written = moves[-1]["written"] - moves[-2]["written"]
    assert written == pytest.approx(plan.written_bytes, rel=0.1)


def test_without_streamed_weights_there_is_no_plan(disk: Path) -> None:
    with OffloadEngine(settings(disk)) as engine, pytest.raises(ConfigError, match="no weights"):
        engine.plan()
