"""In a steady step, what we do makes no thread wait for the device, and pins no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from tests.accelerator.support import DEVICE, device_module, loss_of, make
from tests.training import attached, settings

pytestmark = pytest.mark.skipif(DEVICE != "sim", reason="needs the simulated accelerator")

STEPS = 8


def counted(engine: OffloadEngine | None, scaled: bool) -> dict[str, int]:
    """Synchronising calls and registrations of host memory in the last step, by any thread."""
    model = make(32, 2)
    optimizer = attached(engine, model, AdamW(model.parameters(), 1e-3, foreach=True))
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled)
    for step in range(STEPS):
        device_module.counts(reset=True)
        loss = loss_of(model, step, rows=2, length=16)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found = device_module.counts()
        torch.accelerator.synchronize()
    return {name: number for name, number in found.items() if name.startswith(("sync:", "pinned:"))}


@pytest.mark.parametrize("scaled", [False, True], ids=["", "GradScaler"])
@pytest.mark.parametrize("overlap", [None, "off", "commit", "eager"])
def test_a_steady_step_does_not_wait(disk: Path, overlap: str | None, scaled: bool) -> None:
    if scaled and overlap == "eager":
        pytest.skip("an update during backward cannot be scaled after it")
    expected = counted(None, scaled)
    section = {"enabled": False} if overlap is None else {"overlap": overlap}
    config = settings(disk, "1GiB", optimizer=section, memory={"pinned": "1GiB"})
    with OffloadEngine(config) as engine:
        got = counted(engine, scaled)
    ours = {name: number - expected.get(name, 0) for name, number in got.items()}
    ours = {name: number for name, number in ours.items() if number > 0}
    # `commit` reads what its comparisons found, and the factor by which gradients were scaled.
    allowed = 1 + scaled if overlap == "commit" else 0
    assert sum(ours.values()) <= allowed, ours
