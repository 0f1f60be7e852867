"""The report of a run on an accelerator, whose last pass may be timed by the host or the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload_strategy import OffloadEngine
from tests.accelerator.support import BATCH, SIZE, make, needs_accelerator, train
from tests.training import settings

pytestmark = needs_accelerator


@pytest.mark.parametrize("steps", [3, 9])  # the device times the first eight passes
def test_saved_tensors_are_in_memory_from_their_save_to_their_use(
    steps: int, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    config["tiers"][0]["capacity"] = "1GiB"
    with OffloadEngine(config) as engine:
        net = make(*SIZE)
        optimizer = engine.attach(net, torch.optim.AdamW(net.parameters()))
        train(net, optimizer, range(steps), **BATCH)
        torch.accelerator.synchronize()
        report, profile = engine.report(), engine.profile()
    saved = [span for span in report.timeline if span.lane == "forward"]
    used = [span for span in report.timeline if span.lane == "backward"]
    assert len(saved) == len(used) == len(profile.tensors)
    assert saved[0].nbytes >= profile.tensors[0].nbytes
    assert 0 <= saved[0].begin <= used[-1].begin
    assert 0 < max(span.nbytes for span in saved) < profile.tensors_bytes, "some had left"
    assert used[-1].nbytes < max(span.nbytes for span in saved)
    assert report.comparison is not None
