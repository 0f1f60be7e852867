"""Buffers that are needed again in every step stay mapped, as far as they may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.units import KiB
from tests.store.rig import PAGE, Rig
from tests.training import settings


def _use(rig: Rig, *pages: int) -> None:
    buffers = [rig.store.borrow("optimizer", count * PAGE) for count in pages]
    del buffers
    rig.store.trim()


def _held(rig: Rig) -> int:
    return rig.pool.usage().held_bytes // PAGE


def test_planned_buffers_stay_and_all_others_go(rig: Rig) -> None:
    owner = object()
    rig.pool.plan(owner, [3 * PAGE, 5 * PAGE, 3 * PAGE], 100 * PAGE)
    _use(rig, 3, 3, 3, 5, 7)
    assert _held(rig) == 3 + 3 + 5
    rig.pool.plan(owner, [3 * PAGE], 100 * PAGE)
    rig.store.trim()
    assert _held(rig) == 3
    rig.pool.plan(owner, [], 100 * PAGE)
    rig.store.trim()
    assert _held(rig) == 0


def test_owners_share_what_may_be_kept(rig: Rig) -> None:
    first, second = object(), object()
    rig.pool.plan(first, [4 * PAGE, 4 * PAGE], 10 * PAGE)
    rig.pool.plan(second, [2 * PAGE, 2 * PAGE], 10 * PAGE)
    _use(rig, 4, 4, 2, 2)
    assert _held(rig) == 4 + 4 + 2
    rig.pool.plan(first, [], 10 * PAGE)
    rig.pool.plan(second, [2 * PAGE, 2 * PAGE], 10 * PAGE)
    _use(rig, 4, 4, 2, 2)
    assert _held(rig) == 2 + 2


@pytest.mark.parametrize("pinned", ["64MiB", "1MiB"])
def test_new_weights_find_their_buffers_again_in_every_step(disk: Path, pinned: str) -> None:
    config = settings(
        disk, memory={"pinned": pinned}, optimizer={"overlap": "commit", "subgroup_size": 50_000}
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(model, torch.optim.AdamW(model.parameters(), fused=True))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 200)).square().mean().backward()
            optimizer.step()
        engine._resources.store.wait_for_writes()
        engine._resources.store.trim()
        held = engine._resources.pool.usage().held_bytes
        if pinned == "64MiB":
            assert weights <= held <= 1.05 * weights
        else:
            assert held <= 512 * KiB  # other buffers may need the budget in between
        engine._optimizers.unwrap(optimizer)
        engine._resources.store.wait_for_writes()
        engine._resources.store.trim()
        assert engine._resources.pool.usage().held_bytes == 0
