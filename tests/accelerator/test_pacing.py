"""Memory and copies follow the device, not the host, which is far ahead of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.units import MiB
from tests.accelerator.support import DEVICE, TIERS, device_module, needs_accelerator, sleep
from tests.training import settings

pytestmark = needs_accelerator

LAYERS = 48
STEPS = 5
#: Keeps the device about 300 ms behind the host.
BEHIND = 600_000_000


class Deep(nn.Module):
    """Saves a tensor of four mebibytes in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            x = torch.sin(x)
        return x * self.scale


def run(engine: OffloadEngine | None) -> tuple[torch.Tensor, list[int], list[int], list[Any]]:
    """The gradient; and of each step the bytes at its begin, its peak, and what the host did."""
    model = Deep().to(DEVICE)
    if engine is not None:
        engine.attach(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 20, generator=generator).to(DEVICE).requires_grad_()
    begins, peaks, calls = [], [], []
    for _ in range(STEPS):
        torch.accelerator.synchronize()
        begins.append(device_module.memory_allocated())
        device_module.reset_peak_memory_stats()
        if DEVICE == "sim":
            device_module.counts(reset=True)
        sleep(BEHIND)
        x.grad = None
        model(x).sum().backward()
        peaks.append(device_module.max_memory_allocated() - begins[-1])
        calls.append(device_module.counts() if DEVICE == "sim" else {})
    assert x.grad is not None
    return x.grad.cpu(), begins, peaks, calls


def config(disk: Path, tiers: str) -> dict[str, Any]:
    found = settings(disk, **TIERS[tiers], optimizer={"enabled": False})
    found["activations"] = {"budget": "100%"}
    found["memory"] = {"pinned": "1GiB"}
    found["tiers"][-1]["capacity"] = "4GiB"
    return found


@pytest.mark.parametrize("tiers", TIERS)
def test_memory_is_freed_although_the_device_is_behind(disk: Path, tiers: str) -> None:
    expected, plain_begins, plain_peaks, _ = run(None)
    with OffloadEngine(config(disk, tiers)) as engine:
        got, begins, peaks, calls = run(engine)
    assert torch.equal(got, expected)
    saved = LAYERS * 4 * MiB
    assert min(plain_peaks) >= saved
    assert max(peaks[1:]) <= 0.35 * saved, [peak // MiB for peak in peaks]
    assert begins[1:] == plain_begins[1:], "nothing is kept from one step to the next"
    if DEVICE == "sim" and tiers == "host memory":
        steady = [name for name in calls[-1] if name.startswith(("sync:", "pinned:"))]
        assert steady == [], "a steady step neither waits for the device nor pins memory"
