"""A tier of the device's own memory: what fits there does not move, and the bits are the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from tests.accelerator.support import device_module, make, needs_accelerator, train
from tests.training import Numbers, attached, same_with_and_without, settings, weights

pytestmark = needs_accelerator


def config(disk: Path, capacity: str, overlap: str) -> dict[str, Any]:
    found = settings(disk, activations={"enabled": False}, optimizer={"overlap": overlap})
    found["tiers"].insert(0, {"name": "device", "kind": "device", "capacity": capacity})
    return found


def run(engine: OffloadEngine | None) -> list[Numbers]:
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
    found = train(model, optimizer, range(6), rows=2, length=16)
    states = optimizer.state_dict()["state"]
    found.append({f"{i} {k}": v for i, each in states.items() for k, v in each.items()})
    return [*found, weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("capacity", ["64KiB", "16MiB"], ids=["some", "all"])
def test_the_bits_are_the_same(disk: Path, overlap: str, capacity: str) -> None:
    figures = same_with_and_without(run, config(disk, capacity, overlap))
    moved = figures["offload/optimizer/written_bytes"] + figures["offload/optimizer/read_bytes"]
    assert (moved == 0) is (capacity == "16MiB")
    assert figures["offload/tier/device/used_bytes"] > 0


def test_states_in_the_tier_take_its_memory_and_no_more(disk: Path) -> None:
    before = device_module.memory_allocated()
    with OffloadEngine(config(disk, "16MiB", "eager")) as engine:
        run(engine)
        used = engine.metrics()["offload/tier/device/used_bytes"]
        torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.synchronize()
    assert used > 0
    assert device_module.memory_allocated() <= before + 4096
