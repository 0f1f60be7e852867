"""`planning.device_memory` on a device: the limit holds, the bits are the same."""

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
from tests.training import Numbers, assert_same_bits, gradients

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
