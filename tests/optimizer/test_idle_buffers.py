"""Buffers for states stay mapped from step to step, with and without activations offloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.host_memory import idle_memory as idle
from offload_strategy.host_memory import pool as pool_module
from offload_strategy.host_memory.arena import Arena
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import MiB
from tests.training import settings

_WIDTH = 1024
#: What passes need is remembered for eight of them.
_WARM_UP, _STEPS = 8, 12


@pytest.mark.parametrize(
    ("overlap", "activations", "host_tier"),
    [
        ("eager", False, None),
        ("commit", True, None),
        ("commit", False, "64MiB"),
        ("off", False, None),
    ],
)
def test_memory_is_not_given_back_in_each_step(
    overlap: str,
    activations: bool,
    host_tier: str | None,
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if host_tier is not None:
        # Less than the states have, which step() gives back together when new ones are current.
        # Where they are on a disk, this little would also limit what lanes have idle in turns.
        monkeypatch.setattr(pool_module, "IDLE_BYTES", 16 * MiB)
    pools: list[BufferPool] = []
    made = BufferPool.__init__

    def make(pool: BufferPool, *arguments: object, **options: object) -> None:
        made(pool, *arguments, **options)  # type: ignore[arg-type]
        pools.append(pool)

    # A process of which everything else stays as large as it is.
    monkeypatch.setattr(BufferPool, "__init__", make)

    def resident_bytes() -> int:
        return 500 * MiB + sum(p.usage().held_bytes + p._limit.waiting for p in pools)

    monkeypatch.setattr(idle, "resident_bytes", resident_bytes)
    monkeypatch.setattr(idle, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(idle.IdleLimit, "has_room", lambda self, nbytes: True)
    given_back: list[int] = []
    give_back = Arena._give_back

    def noted(arena: Arena, block: int) -> None:
        given_back.append(block)
        give_back(arena, block)

    monkeypatch.setattr(Arena, "_give_back", noted)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(3)])
    config = settings(
        disk,
        host_tier,
        optimizer={"overlap": overlap, "subgroup_size": _WIDTH * (_WIDTH + 1)},
        activations={"enabled": activations},
        memory={"pinned": "128MiB"},
    )
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters(), fused=True))
        gave_back = []
        for _ in range(_WARM_UP + _STEPS):
            before = len(given_back)
            model(torch.randn(8, _WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            gave_back.append(len(given_back) > before)
        assert pools[0].usage().held_bytes >= 4 * MiB
    # How many buffers are in use at a time is up to threads: a step now and then may need more than
    # those before it, and the next gives the rest back.
    assert sum(gave_back[_WARM_UP:]) < _STEPS / 2, gave_back
