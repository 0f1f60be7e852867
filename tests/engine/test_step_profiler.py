"""The last step as numbers: what was saved and used, and what was updated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.plan_runtime.profile import Profile
from offload_strategy.plan_runtime.replay import replay
from tests.training import settings


def profile_of(tmp_path: Path, overlap: str | None, steps: int = 4) -> tuple[Profile, float]:
    """Of a training with so many steps; and bytes of its optimizer's states on the tier."""
    options: dict[str, Any] = {"enabled": overlap is not None}
    if overlap is not None:
        options["overlap"] = overlap
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    config = settings(tmp_path, activations={"min_size": 1024}, optimizer=options)
    config["optimizer"]["subgroup_size"] = 64 * 64
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(net, AdamW(net.parameters()))
        for _ in range(steps):
            net(torch.randn(32, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        engine._resources.store.wait_for_writes()
        return engine.profile(), engine.metrics()["offload/tier/nvme/used_bytes"]


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_updates_are_part_of_it(tmp_path: Path, overlap: str) -> None:
    profile, states_bytes = profile_of(tmp_path, overlap)
    moving = [update for update in profile.updates if update.written_bytes]
    assert len(moving) == 4, "one for each layer"
    assert sum(update.read_bytes for update in moving) == states_bytes
    assert sum(update.written_bytes for update in moving) == states_bytes
    assert all(update.seconds > 0 for update in profile.updates)
    # What was computed ahead is made visible in step(), which moves nothing.
    assert len(profile.updates) == (8 if overlap == "commit" else 4)
    assert profile.shared_cores
    ready = [update.ready_at for update in profile.updates]
    assert ready == sorted(ready)
    if overlap == "off":
        assert min(ready) >= max(tensor.uses[-1] for tensor in profile.tensors)
    else:
        assert min(ready) >= profile.forward_seconds


def test_without_a_swapped_optimizer_there_are_no_updates(tmp_path: Path) -> None:
    updated, _ = profile_of(tmp_path, "eager")
    plain, _ = profile_of(tmp_path, None)
    assert plain.updates == ()
    assert [t.nbytes for t in updated.tensors] == [t.nbytes for t in plain.tensors]


def test_a_replay_of_it_is_at_least_as_long_as_its_parts(tmp_path: Path) -> None:
    profile, _ = profile_of(tmp_path, "commit")
    found = replay(profile)
    parts = profile.step_seconds + sum(update.seconds for update in profile.updates)
    assert found.step_seconds >= parts - 1e-6
    assert found.lanes["tiers write"].nbytes == sum(u.written_bytes for u in profile.updates)


def test_it_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    profile, _ = profile_of(tmp_path, "eager")
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
