"""Subgroups where nobody says how large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.plan_runtime.space_requirements import (
    SUBGROUPS_IN_FLIGHT,
    subgroup_size,
)
from offload_strategy.units import GiB, MiB
from tests.training import settings


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
