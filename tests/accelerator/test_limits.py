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
    Transformer,
    device_module,
    loss_of,
    make,
    needs_accelerator,
)
from tests.training import (
    Numbers,
    activations_only,
    assert_same_bits,
    gradients,
    moved,
    on_disk,
    settings,
)

pytestmark = needs_accelerator

PASSES = 12


def model() -> Any:
    torch.manual_seed(0)
    return Transformer(*SIZE).to(DEVICE)


def passes(engine: OffloadEngine | None) -> tuple[list[Numbers], list[int]]:
    """Gradients and the peak of each pass."""
    trained = model()
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
        # On the host, so that what the test keeps takes nothing of the limit.
        found.append({name: gradient.cpu() for name, gradient in gradients(trained).items()})
        trained.zero_grad(set_to_none=False)
    return found, peaks


def config(disk: Path, limit: int, host: str | None = None) -> dict[str, Any]:
    dram = [] if host is None else [{"name": "host", "kind": "dram", "capacity": host}]
    return {
        "tiers": [*dram, {"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "activations": {"min_size": "16KiB"},
        "optimizer": {"enabled": False},
        "memory": {"pinned": "256MiB"},
        "planning": {"device_memory": limit},
    }


@pytest.mark.parametrize(("share", "host"), [(0.4, None), (0.7, "1GiB"), (0.4, "16MiB")])
def test_a_limit_holds(disk: Path, share: float, host: str | None) -> None:
    gc.collect()
    device_module.empty_cache()
    expected, plain = passes(None)
    gc.collect()
    before = device_module.memory_allocated()
    limit = int(before + share * (max(plain) - before))
    with OffloadEngine(config(disk, limit, host)) as engine:
        got, peaks = passes(engine)
        figures = engine.metrics()
    for number, (now, then) in enumerate(zip(got, expected, strict=True)):
        assert_same_bits(now, then), number
    assert figures["offload/activations/plan_limit_bytes"] == limit
    told = f"{[peak // MiB for peak in peaks]} of {limit // MiB} MiB"
    assert max(peaks[-4:]) <= limit, told


def test_what_fits_stays(disk: Path) -> None:
    _, plain = passes(None)
    gc.collect()
    limit = 2 * max(plain)
    with OffloadEngine(config(disk, limit)) as engine:
        passes(engine)
        assert engine.metrics()["offload/activations/step_left_bytes"] == 0


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
