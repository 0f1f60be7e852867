"""Limits of device memory and of pinned memory hold, and the bits are the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.units import MiB
from tests.accelerator.support import (
    BATCH,
    DEVICE,
    SIZE,
    device_module,
    loss_of,
    make,
    needs_accelerator,
    peaks,
    train,
)
from tests.training import (
    Numbers,
    activations_only,
    assert_same_bits,
    assert_same_history,
    attached,
    gradients,
    moved,
    on_disk,
    same_with_and_without,
    settings,
    weights,
)

pytestmark = needs_accelerator

#: How much of what plain training takes is allowed, a tier of host memory, and whether it is a
#: limit of plans, or of all memory in use, under which ``mode: auto`` chooses what leaves.
LIMITS: list[tuple[float, str | None, bool]] = [
    (0.4, None, True),
    (0.7, "1GiB", True),
    (0.4, "16MiB", True),
    (2.0, None, True),
    (0.3, None, False),
    (0.7, None, False),
    (2.0, None, False),
]


def training(engine: OffloadEngine | None, steps: int) -> tuple[list[Numbers], list[int]]:
    """Losses and weights; and the peak of each step."""
    model = make(*SIZE)
    optimizer = attached(engine, model, AdamW(model.parameters()))
    found: list[Numbers] = []
    highest = peaks(
        lambda step: found.extend(train(model, optimizer, range(step, step + 1), **BATCH)), steps
    )
    return [{n: v.cpu() for n, v in each.items()} for each in (*found, weights(model))], highest


@pytest.mark.parametrize(("share", "host", "planned"), LIMITS)
def test_a_limit_holds_and_what_fits_stays(
    disk: Path, share: float, host: str | None, planned: bool
) -> None:
    steps = 12 if planned else 8
    gc.collect()
    device_module.empty_cache()
    expected, plain = training(None, steps)
    gc.collect()
    before = device_module.memory_allocated()
    limit = int(before + share * (max(plain) - before))
    config: dict[str, Any] = {
        "tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "activations": {"enabled": True if planned else "auto", "min_size": "16KiB"},
        "memory": {"pinned": "256MiB"},
    }
    if planned:
        config |= {"optimizer": {"enabled": False}, "planning": {"device_memory": limit}}
    else:
        config["memory"]["limit"] = limit
    if host is not None:
        config["tiers"].insert(0, {"name": "host", "kind": "dram", "capacity": host})
    with OffloadEngine(config) as engine:
        got, highest = training(engine, steps)
        figures, chosen = engine.metrics(), engine.effective_config()
    assert_same_history(got, expected)
    told = f"{[peak // MiB for peak in highest]} of {limit // MiB} MiB, plain {max(plain) // MiB}"
    # A plan is of what earlier steps did; `memory.limit` holds from the first step on.
    assert max(highest[-4:] if planned else highest) <= limit, told
    if planned:
        assert figures["offload/activations/plan_limit_bytes"] == limit
        assert (figures["offload/activations/step_left_bytes"] == 0) is (share > 1)
    else:
        assert not chosen.optimizer.enabled, told
        assert chosen.activations.enabled is (share < 1), told


def test_pinned_memory_is_given_back(disk: Path) -> None:
    with activations_only(disk) as engine:
        model = make(engine=engine)
        for step in range(3):
            loss_of(model, step).backward()
        assert engine.metrics()["offload/memory/pinned_peak_bytes"] > 0
        pending = loss_of(model, 9)
    # Closed with copies and writes under way, and a graph that still refers to them.
    del pending
    torch.accelerator.synchronize()
    assert engine.metrics()["offload/memory/pinned_bytes"] == 0


def test_a_tensor_larger_than_the_pinned_memory_passes(disk: Path) -> None:
    config = settings(disk, optimizer={"enabled": False}, memory={"pinned": "1MiB"})
    weight = nn.Linear(512, 512, bias=False).to(DEVICE)
    x = torch.randn(8192, 512, device=DEVICE)
    weight(x).pow(2).sum().backward()
    expected = gradients(weight)
    weight.zero_grad()
    with OffloadEngine(config) as engine:
        engine.attach(weight)
        loss = weight(x).pow(2).sum()
        on_disk(engine)
        loss.backward()
        assert_same_bits(gradients(weight), expected)
        assert moved(engine) == x.nbytes


# ---------------------------------------------------------------------- a tier of device memory
def tier_of_the_device(disk: Path, capacity: str, overlap: str) -> dict[str, Any]:
    found = settings(disk, activations={"enabled": False}, optimizer={"overlap": overlap})
    found["tiers"].insert(0, {"name": "device", "kind": "device", "capacity": capacity})
    return found


def six_steps(engine: OffloadEngine | None) -> list[Numbers]:
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3))
    found = train(model, optimizer, range(6), rows=2, length=16)
    states = optimizer.state_dict()["state"]
    found.append({f"{i} {k}": v for i, each in states.items() for k, v in each.items()})
    return [*found, weights(model)]


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("capacity", ["64KiB", "16MiB"], ids=["some", "all"])
def test_what_fits_in_a_tier_of_the_device_does_not_move(
    disk: Path, overlap: str, capacity: str
) -> None:
    figures = same_with_and_without(six_steps, tier_of_the_device(disk, capacity, overlap))
    moved = figures["offload/optimizer/written_bytes"] + figures["offload/optimizer/read_bytes"]
    assert (moved == 0) is (capacity == "16MiB")
    assert figures["offload/tier/device/used_bytes"] > 0


def test_states_in_a_tier_of_the_device_take_its_memory_and_no_more(disk: Path) -> None:
    before = device_module.memory_allocated()
    with OffloadEngine(tier_of_the_device(disk, "16MiB", "eager")) as engine:
        six_steps(engine)
        used = engine.metrics()["offload/tier/device/used_bytes"]
        torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.synchronize()
    assert used > 0
    assert device_module.memory_allocated() <= before + 4096
