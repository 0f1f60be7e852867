"""Transformers' Trainer with two processes: numbers and checkpoints are those without offload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

_SCRIPT = Path(__file__).parent / "trainer.py"


def test_the_trainer_and_lora_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        runs = json.loads((tmp_path / f"found-{rank}").read_text())
        # With and without LoRA: from the start, and resumed by both from the files of both.
        assert len(runs) == 2 * (1 + 4)
        assert [run["case"] for run in runs if run["differs"]] == []
        offloaded = [run for run in runs if run["case"][1]]
        assert len(offloaded) == 2 * 3
        assert all(moved > 0 for run in offloaded for moved in run["moved"])
    assert list(tier.iterdir()) == []
