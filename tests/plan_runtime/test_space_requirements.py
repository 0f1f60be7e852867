"""Subgroups where nobody says how large, and memory at the peak: every part is counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.plan_runtime.space_requirements import (
    SUBGROUPS_IN_FLIGHT,
    HostMemoryPrediction,
    predict_host_memory,
    subgroup_size,
)
from offload_strategy.units import GiB, MiB
from tests.training import settings
from tests.weights.support import streaming


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(1000, 1 << 18), (10_000_000, 1 << 19), (50_000_000, 1 << 21), (10**11, 1 << 22)],
)
def test_it_follows_the_model_where_memory_allows_it(parameters: int, expected: int) -> None:
    assert subgroup_size(parameters, each=8.0, memory=64 * GiB) == expected


@pytest.mark.parametrize("memory", [5 * MiB, 30 * MiB, 128 * MiB])
@pytest.mark.parametrize("each", [4.0, 8.0, 16.5])
def test_what_is_in_flight_fits_and_could_not_be_twice_as_much(memory: int, each: float) -> None:
    size = subgroup_size(10**9, each, memory)
    assert SUBGROUPS_IN_FLIGHT * size * each <= memory
    assert size == 1 << 22 or SUBGROUPS_IN_FLIGHT * 2 * size * each > memory


def test_it_is_never_so_small_that_calls_cost_more_than_memory() -> None:
    assert subgroup_size(10**9, each=8.0, memory=0) == 1 << 16


@pytest.mark.parametrize(
    ("overlap", "pinned", "expected"),
    [("eager", "1GiB", 1 << 18), ("eager", "4MiB", 1 << 17), ("commit", "16MiB", 1 << 17)],
)
def test_the_engine_looks_at_the_buffers_that_states_may_take(
    disk: Path, overlap: str, pinned: str, expected: int
) -> None:
    config = settings(
        disk,
        memory={"pinned": pinned},
        optimizer={"overlap": overlap, "subgroup_size": "auto"},
        activations={"enabled": False},
    )
    model = nn.Linear(1024, 1024, bias=False)
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        sizes = {
            sum(param_slice.numel for param_slice in subgroup.slices)
            for subgroup in optimizer._subgroups
        }
    assert sizes == {expected}


# ---------------------------------------------------------------------- host memory
def forecast(**options: Any) -> HostMemoryPrediction:
    return predict_host_memory(
        **{
            "blocks": (60 * MiB, 100 * MiB, 100 * MiB, 80 * MiB),
            "trained": 340 * MiB,
            "largest": 50 * MiB,
            "subgroup": 16 * MiB,
            "states_share": 2.0,
            "process_bytes": 300 * MiB,
            "computing_bytes": 70 * MiB,
            "blocks_in_flight": 2,
            "overlap": "eager",
            "pinned": 4 * GiB,
            "idle": 256 * MiB,
            **options,
        },
    )


def test_parts_of_the_peak() -> None:
    for count, expected in ((2, 200), (1, 100), (3, 280), (9, 340)):  # neighbouring blocks
        assert forecast(blocks_in_flight=count).weights == expected * MiB
    # States of what is updated and of what is next.
    assert forecast().states == 2 * (50 + 16) * MiB
    assert forecast(overlap="off").states == 2 * 3 * 16 * MiB
    # New weights wait for step() only with commit.
    assert forecast().waiting == 0
    assert forecast(overlap="commit").waiting == 340 * MiB
    assert forecast(overlap="commit", pinned=400 * MiB).waiting == 200 * MiB
    # Narrow states are computed in wide copies.
    narrow = forecast(states_share=1.0, upcast_share=2.0)
    assert narrow.computing - forecast().computing == 2 * 16 * MiB
    text = str(forecast(pinned=256 * MiB))
    assert "| weights of blocks in flight | 200 MiB |" in text
    assert "| buffers beyond memory.pinned | -" in text


@pytest.mark.parametrize("overlap", ["eager", "commit", "off"])
@pytest.mark.parametrize("pinned", [64 * MiB, 512 * MiB, 4 * GiB])
def test_buffers_are_within_what_is_allowed(overlap: str, pinned: int) -> None:
    found = forecast(overlap=overlap, pinned=pinned)
    buffers = found.peak_bytes - found.process - found.computing
    assert buffers <= pinned
    assert (found.beyond > 0) == (buffers == pinned)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


@pytest.mark.parametrize("overlap", ["eager", "commit", "off"])
def test_an_engine_predicts_without_moving_anything(disk: Path, overlap: str) -> None:
    model = Chain()
    with streaming(disk, optimizer={"overlap": overlap}) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        before = engine.metrics()
        found = engine.predict_memory(model, optimizer, torch.ones(4, 64))
        after = engine.metrics()
        for client in ("activations", "optimizer", "parameters"):
            key = f"offload/{client}/read_bytes"
            assert after[key] == before[key]
        # All gradients stay until step(), unless updates use them up as they come.
        assert (found.computing > 6 * 64 * 64 * 4) == (overlap != "eager")
        assert found.weights == 2 * 65 * 64 * 4
        model(torch.ones(4, 64)).backward()
        optimizer.step()
        assert engine.predict_memory(model, optimizer, torch.ones(4, 64)).weights == found.weights


def test_an_optimizer_in_memory_is_counted_with_the_process(disk: Path) -> None:
    model = Chain()
    with streaming(disk, optimizer={"enabled": False}) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        assert engine.predict_memory(model, optimizer, torch.ones(4, 64)).states == 0
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(ConfigError, match=r"parameters\.enabled"):
            engine.predict_memory(model, optimizer, torch.ones(4, 64))
