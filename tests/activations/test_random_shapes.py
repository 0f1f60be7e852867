"""Lengths and branches that change with every step: never wrong, and memory stays flat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from offload_strategy.units import MiB
from tests.activations import random_shapes

ROOT = Path(__file__).resolve().parents[2]
STEPS = 500
#: Of the process. A tensor that is lost in each step would take more than twice as much.
_GROWTH_BYTES = 6 * MiB


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' malloc keeps what is freed")
def test_five_hundred_steps_leave_memory_flat(disk: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.activations.random_shapes", str(STEPS), str(disk), "{}"],
        cwd=ROOT,
        # With glibc's moving threshold freed activations stay in its heap and hide everything.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    seen: dict[str, Any] = json.loads(process.stdout)
    assert seen["different"] == [], "steps whose gradients are not those of plain PyTorch"
    assert seen["tickets"] == 0
    assert seen["lent"] == 0
    assert max(seen["held"]) <= 8 * MiB
    after_100, at_the_end = median(seen["rss"][8:13]), median(seen["rss"][-5:])
    assert at_the_end - after_100 < _GROWTH_BYTES, seen["rss"]
    metrics = seen["metrics"]
    assert metrics["offload/activations/written_bytes"] > 200 * MiB
    assert metrics["offload/activations/read_bytes"] > 200 * MiB
    # What was not fetched ahead is told: the first of each backward at least; most are.
    assert 0 < metrics["offload/activations/missed_loads"] < seen["loads"] / 4


@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": 0}, {"prefetch": "64KiB"}, {"budget": "50%"}, {"host": "256KiB"}],
    ids=str,
)
def test_gradients_are_the_same_with(options: dict[str, Any], disk: Path) -> None:
    seen = random_shapes.run(24, disk, compare_every=1, **options)
    assert seen["different"] == []
    assert seen["tickets"] == seen["lent"] == 0
    assert seen["metrics"]["offload/activations/written_bytes"] > 0
