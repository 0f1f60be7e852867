"""Limits of device memory and of pinned memory hold, and the bits are the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
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
    attached,
    gradients,
    moved,
    on_disk,
    settings,
    weights,
)

pytestmark = needs_accelerator

PASSES = 12
STEPS = 8

Run = Callable[[OffloadEngine | None], tuple[list[Numbers], list[int]]]
"""Returns what must be the same, which takes no device memory, and the peak of each step."""


def limit_of(share: float, run: Run) -> tuple[int, list[Numbers]]:
    """A limit that leaves a share of what a run takes without offload, and its numbers."""
    gc.collect()
    device_module.empty_cache()
    expected, plain = run(None)
    gc.collect()
    before = device_module.memory_allocated()
    return int(before + share * (max(plain) - before)), expected


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
    limit, expected = limit_of(share, passes)
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


def training(engine: OffloadEngine | None) -> tuple[list[Numbers], list[int]]:
    """The weights after some steps, and the peak of each."""
    model = make(*SIZE)
    optimizer = attached(engine, model, torch.optim.AdamW(model.parameters()))
    peaks = []
    for number in range(STEPS):
        device_module.reset_peak_memory_stats()
        loss_of(model, number, **BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        peaks.append(device_module.max_memory_allocated())
    return [{name: value.cpu() for name, value in weights(model).items()}], peaks


@pytest.mark.parametrize(
    ("share", "leaves"), [(2.0, set()), (0.7, {"activations"}), (0.3, {"activations"})]
)
def test_what_leaves_is_chosen_so_that_a_limit_holds_from_the_first_step_on(
    disk: Path, share: float, leaves: set[str]
) -> None:
    """With ``mode: auto``."""
    limit, expected = limit_of(share, training)
    config = {
        "tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "activations": {"enabled": "auto", "min_size": "16KiB"},
        "memory": {"limit": limit, "pinned": "256MiB"},
    }
    with OffloadEngine(config) as engine:
        got, peaks = training(engine)
        chosen = engine.effective_config()
    assert_same_history(got, expected)
    told = f"{[peak // MiB for peak in peaks]} of {limit // MiB} MiB"
    assert {each for each in ("activations", "optimizer") if getattr(chosen, each).enabled} == (
        leaves
    ), told
    assert max(peaks) <= limit, told


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
