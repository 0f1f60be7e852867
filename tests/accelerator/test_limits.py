"""Limits of device memory and of pinned memory hold, and the bits are the same."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
)
from tests.training import (
    Numbers,
    activations_only,
    assert_same_bits,
    assert_same_history,
    gradients,
    moved,
    on_disk,
    settings,
)

pytestmark = needs_accelerator

PASSES = 12


def passes(engine: OffloadEngine | None) -> tuple[list[Numbers], list[int]]:
    """Gradients and the peak of each pass."""
    trained = make(*SIZE)
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if engine is not None:
        engine.attach(trained)
    found, peaks = [], []
    for number in range(PASSES):
        torch.accelerator.synchronize()
        device_module.reset_peak_memory_stats()
        torch.manual_seed(number)
        loss_of(trained, number, **BATCH).backward()
        torch.accelerator.synchronize()
        peaks.append(device_module.max_memory_allocated())
        found.append({name: gradient.cpu() for name, gradient in gradients(trained).items()})
        trained.zero_grad(set_to_none=False)
    return found, peaks


@pytest.mark.parametrize(
    ("share", "host"), [(0.4, None), (0.7, "1GiB"), (0.4, "16MiB"), (2.0, None)]
)
def test_a_limit_holds_and_what_fits_stays(disk: Path, share: float, host: str | None) -> None:
    gc.collect()
    device_module.empty_cache()
    expected, plain = passes(None)
    gc.collect()
    before = device_module.memory_allocated()
    limit = int(before + share * (max(plain) - before))
    config: dict[str, Any] = {
        "tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "activations": {"min_size": "16KiB"},
        "optimizer": {"enabled": False},
        "memory": {"pinned": "256MiB"},
        "planning": {"device_memory": limit},
    }
    if host is not None:
        config["tiers"].insert(0, {"name": "host", "kind": "dram", "capacity": host})
    with OffloadEngine(config) as engine:
        got, peaks = passes(engine)
        figures = engine.metrics()
    assert_same_history(got, expected)
    assert figures["offload/activations/plan_limit_bytes"] == limit
    told = f"{[peak // MiB for peak in peaks]} of {limit // MiB} MiB"
    assert max(peaks[-4:]) <= limit, told
    assert (figures["offload/activations/step_left_bytes"] == 0) is (share > 1)


def test_pinned_memory_is_given_back(disk: Path) -> None:
    model = make()
    with activations_only(disk) as engine:
        engine.attach(model)
        for step in range(3):
            loss_of(model, step).backward()
        metrics = engine.metrics()
        assert metrics["offload/memory/pinned_peak_bytes"] > 0
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
