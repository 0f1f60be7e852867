"""The plan of streamed weights, where every byte that moves is there once, and subgroup sizes."""

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.engine import attached_optimizers
from offload_strategy.plan_runtime.space_requirements import subgroup_size
from offload_strategy.plan_runtime.weight_schedule import BlockPass, weight_schedule
from offload_strategy.units import GiB, MiB
from tests.training import moved, on_disk, settings
from tests.weights.support import streaming


# ---------------------------------------------------------------------- streamed weights
def passes(count, *trained_and_states):
    """Forward and backward through blocks of 10 bytes of weights each."""
    order = [(number, False) for number in range(count)]
    order += [(number, True) for number in reversed(range(count))]
    return [BlockPass(f"block {number}", back, 10, *trained_and_states) for number, back in order]


@pytest.mark.parametrize("blocks_in_flight", [1, 2, 3])
def test_what_is_read_and_written(blocks_in_flight):
    plan = weight_schedule(passes(6, 10, 20), blocks_in_flight, learned=True, updates=True)
    assert plan.written_bytes == 6 * 30
    # What the end of forward has left is not read again for backward, nor the other way round.
    assert plan.read_bytes == 6 * 20 + 2 * (6 - blocks_in_flight) * 10


def test_while_a_block_computes_the_next_is_read_and_the_last_is_written():
    row = weight_schedule(passes(4, 10, 20), 2, learned=True, updates=True).rows[6]
    assert (row.block_pass.block, row.block_pass.backward) == ("block 1", True)
    assert (row.read_ahead, row.written) == (("block 0",), "block 2")
    assert (row.read_bytes, row.written_bytes) == (10 + 20, 30)


def test_without_updates_in_backward_and_for_frozen_blocks_only_weights_are_read():
    plan = weight_schedule(passes(4, 10, 20), 2, learned=True, updates=False)
    assert (plan.read_bytes, plan.written_bytes) == (2 * 2 * 10, 0)
    assert weight_schedule(passes(4), 2, learned=True, updates=True).written_bytes == 0
    assert weight_schedule([], 2, learned=False, updates=True).rows == ()


def test_an_engine_tells_its_plan_and_keeps_to_it(disk):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with streaming(disk, optimizer={"overlap": "eager"}) as engine:
        optimizer = engine.attach(model, torch.optim.Adam(model.parameters()))
        before = engine.plan()
        assert not before.learned
        assert "| forward | 0 | " in str(before)
        assert "no step was seen yet" in str(before)
        written = []
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            on_disk(engine)
            written.append(moved(engine, "parameters") + moved(engine, "optimizer"))
        plan = engine.plan()
    assert plan.learned
    assert "as in the last step" in str(plan)
    assert written[-1] - written[-2] == pytest.approx(plan.written_bytes, rel=0.1)


def test_without_streamed_weights_there_is_no_plan(disk):
    with OffloadEngine(settings(disk)) as engine, pytest.raises(ConfigError, match="no weights"):
        engine.plan()


# ---------------------------------------------------------------------- subgroups
@pytest.mark.parametrize(
    ("parameters", "each", "memory", "expected"),
    [
        # As the model is large.
        (1000, 8.0, 64 * GiB, 1 << 18),
        (10_000_000, 8.0, 64 * GiB, 1 << 19),
        (50_000_000, 8.0, 64 * GiB, 1 << 21),
        (10**11, 8.0, 64 * GiB, 1 << 22),
        # Four at a time fit in memory, and four of twice the size would not.
        (10**9, 4.0, 5 * MiB, 1 << 18),
        (10**9, 8.0, 30 * MiB, 1 << 19),
        (10**9, 16.5, 128 * MiB, 1 << 20),
        # With fewer, calls cost more than memory.
        (10**9, 8.0, 0, 1 << 16),
    ],
)
def test_subgroups_follow_the_model_where_memory_allows_it(parameters, each, memory, expected):
    assert subgroup_size(parameters, each, memory) == expected
    larger = subgroup_size(parameters, each, memory, most=1 << 24)
    assert larger == (1 << 24 if expected == 1 << 22 else expected)


@pytest.mark.parametrize(
    ("overlap", "pinned", "expected"),
    [("eager", "1GiB", 1 << 18), ("eager", "4MiB", 1 << 17), ("commit", "8MiB", 1 << 17)],
)
def test_the_engine_looks_at_the_buffers_that_states_may_take(disk, overlap, pinned, expected):
    assert sizes_of_subgroups(disk, overlap, {"pinned": pinned}) == {expected}


@pytest.mark.parametrize(
    ("overlap", "limit", "expected"),
    [("commit", "4GiB", 1 << 16), ("commit", None, 1 << 18), ("eager", "4GiB", 1 << 18)],
)
def test_commit_has_a_size_of_its_own_on_the_cpu_within_a_limit_of_memory(
    disk, overlap, limit, expected, monkeypatch
):
    monkeypatch.setattr(attached_optimizers, "MOST_TO_COMMIT_ON_CPU", 1 << 16)
    memory = {"pinned": "1GiB"} | ({} if limit is None else {"limit": limit})
    assert sizes_of_subgroups(disk, overlap, memory) == {expected}


def sizes_of_subgroups(disk, overlap, memory):
    """Those of a model with a million parameters."""
    optimizer = {"overlap": overlap, "subgroup_size": "auto"}
    config = settings(disk, memory=memory, optimizer=optimizer)
    config["activations"] = {"enabled": False}
    model = nn.Linear(1024, 1024, bias=False)
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        return {sum(part.numel for part in group.slices) for group in optimizer._subgroups}
