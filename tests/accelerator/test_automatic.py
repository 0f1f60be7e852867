"""``mode: auto`` on a device: what leaves is chosen so that a limit holds from the first step."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.units import MiB
from tests.accelerator.support import (
    BATCH,
    DEVICE,
    SIZE,
    Transformer,
    device_module,
    loss_of,
    needs_accelerator,
)
from tests.training import Numbers, assert_same_bits, weights

pytestmark = needs_accelerator

STEPS = 8


def training(engine: OffloadEngine | None) -> tuple[list[int], Numbers]:
    """Return the peak of each step, and the weights."""
    torch.manual_seed(0)
    model: Any = Transformer(*SIZE).to(DEVICE)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    peaks = []
    for number in range(STEPS):
        device_module.reset_peak_memory_stats()
        loss_of(model, number, **BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        peaks.append(device_module.max_memory_allocated())
    return peaks, {name: value.cpu() for name, value in weights(model).items()}


@pytest.mark.parametrize(
    ("share", "leaves"), [(2.0, set()), (0.7, {"activations"}), (0.3, {"activations"})]
)
def test_a_limit_holds_from_the_first_step_on(disk: Path, share: float, leaves: set[str]) -> None:
    gc.collect()
    device_module.empty_cache()
    plain, expected = training(None)
    gc.collect()
    before = device_module.memory_allocated()
    limit = int(before + share * (max(plain) - before))
    config = {
        "tiers": [{"name": "nvme", "kind": "ssd", "path": str(disk)}],
        "activations": {"enabled": "auto", "min_size": "16KiB"},
        "memory": {"limit": limit, "pinned": "256MiB"},
    }
    with OffloadEngine(config) as engine:
        peaks, got = training(engine)
        chosen = engine.effective_config()
    assert_same_bits(got, expected)
    told = f"{[peak // MiB for peak in peaks]} of {limit // MiB} MiB, plain {max(plain) // MiB}"
    assert {each for each in ("activations", "optimizer") if getattr(chosen, each).enabled} == (
        leaves
    ), told
    assert max(peaks) <= limit, told
