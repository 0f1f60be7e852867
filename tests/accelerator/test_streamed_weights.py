"""Weights that are streamed to a CUDA device: the same bits, in less device memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from tests.accelerator.support import (
    DEVICE,
    TIERS,
    device_module,
    make,
    memory_beyond,
    needs_accelerator,
    train,
)
from tests.training import Numbers, assert_same_history, attached, in_turn, settings, weights

pytestmark = needs_accelerator


def streaming(disk: Path, host: str | None = None, **sections: Any) -> OffloadEngine:
    return OffloadEngine(
        settings(disk, host, **{"parameters": {"enabled": True, "min_size": 1}, **sections})
    )


def run(model: nn.Module, engine: OffloadEngine | None) -> list[Numbers]:
    optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-2))
    history = train(model, optimizer, range(5))
    if engine is not None:
        engine.close()
    return [*history, weights(model)]


@pytest.mark.parametrize(
    ("tiers", "overlap", "recompute"),
    [
        *in_turn(TIERS, ["commit", "eager", "off"], [True, False]),
        *in_turn(TIERS, ["eager", "off", "commit"], [False, True]),
    ],
)
def test_the_bits_are_the_same(disk: Path, tiers: str, overlap: str, recompute: bool) -> None:
    engine = streaming(disk, **TIERS[tiers], optimizer={"overlap": overlap})
    got = run(make(recompute=recompute), engine)
    assert_same_history(got, run(make(recompute=recompute), None))


def test_a_model_is_made_on_the_device_while_its_weights_leave(disk: Path) -> None:
    expected = run(make(), None)
    engine = streaming(disk, optimizer={"overlap": "eager"})
    with engine.building():
        model = make()
    assert_same_history(run(model, engine), expected)


def test_a_model_on_the_meta_device_is_made_where_it_is_wanted(disk: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with streaming(disk) as engine:
        engine.attach(model, device=torch.device(DEVICE))
        assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
        model(torch.ones(2, 64, device=DEVICE)).sum().backward()


def large(width: int = 2048, layers: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, device=DEVICE) for _ in range(layers)))


def losses_of(model: nn.Module, optimizer: Any) -> list[float]:
    inputs = torch.ones(8, 2048, device=DEVICE)
    found = []
    for _ in range(3):
        loss = (model(inputs) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        del loss
    return found


def test_weights_larger_than_the_memory_allowed_are_trained(disk: Path) -> None:
    model = large()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    expected = losses_of(model, AdamW(model.parameters(), lr=1e-3))
    del model
    gc.collect()
    device_module.empty_cache()
    used = device_module.memory_allocated()
    config = {
        "tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "parameters": {"enabled": True},
        "optimizer": {"overlap": "eager"},
        "memory": {"pinned": "256MiB"},
    }
    # The weights do not fit: `close` brings them back when the limit is gone.
    with OffloadEngine(config) as engine, memory_beyond(int(0.75 * nbytes)):
        with pytest.raises(torch.OutOfMemoryError):
            large()
        gc.collect()
        device_module.empty_cache()
        device_module.reset_peak_memory_stats()
        with engine.building():
            model = large()
        optimizer = engine.attach(model, AdamW(model.parameters(), lr=1e-3))
        assert losses_of(model, optimizer) == expected
        assert device_module.max_memory_allocated() - used < 0.75 * nbytes
