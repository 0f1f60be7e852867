"""Lengths and branches that change with every step: never wrong, and memory stays flat."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from offload_strategy.telemetry import Direction
from offload_strategy.units import MiB
from tests.training import bits, gradients, settings

ROOT = Path(__file__).resolve().parents[2]
WIDTH, LONGEST, STEPS = 64, 192, 300
BRANCHES = ("once", "twice", "recurrent", "squashed")
#: Of the process. A tensor that is lost in each step would take twice as much.
_GROWTH_BYTES = 5 * MiB


class Mixture(nn.Module):
    """Attention, experts that the data choose, and as many rounds of both as a coin says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        if branch == "recurrent":
            return self.recurrent(x[:, :12])[0]  # hundreds of small saved tensors
        for _ in range(2 if branch == "twice" else 1):
            query, key, value = self.mix(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
            weights, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero(as_tuple=True)
                if len(rows[0]):  # an expert that nobody chose saves nothing
                    out = out.index_put(rows, expert(x[rows]) * weights[rows][:, None])
            x = x + out
        return torch.tanh(x) if branch == "squashed" else x


def gradients_of(model: nn.Module, step: int, engine: OffloadEngine | None = None) -> Any:
    """Of a step whose length and branch come of its number."""
    chance = random.Random(step)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, chance.randint(1, LONGEST), WIDTH, generator=generator)
    model.zero_grad()
    loss = model(x, chance.choice(BRANCHES)).pow(2).mean()
    if engine is not None and step % 3 == 0:
        engine._resources.store.wait_for_writes()
    loss.backward()
    return {name: bits(value) for name, value in gradients(model).items()}


def run(steps: int, directory: Path) -> dict[str, Any]:
    """Train, and compare some steps with plain PyTorch; returns memory and counts on the way."""
    torch.set_num_threads(1)
    # As much as a few steps need: more would fill for a while, with buffers of ever new sizes.
    memory, off = {"pinned": "8MiB"}, {"enabled": False}
    config = settings(directory, optimizer=off, memory=memory)
    model, twin = Mixture(), Mixture()
    rss: list[int] = []
    held: list[int] = []
    different: list[int] = []
    loads = 0
    with OffloadEngine(config) as engine:
        engine.attach(model)
        for step in range(steps):
            got = gradients_of(model, step, engine)
            if step % 25 == 0:
                twin.load_state_dict(model.state_dict())
                if gradients_of(twin, step) != got:
                    different.append(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.05 * parameter.grad
            if step % 10 == 9:
                loads += sum(move.direction == Direction.READ for move in engine._recorder.moves)
                # The records of moves fill for a thousand steps before the oldest are dropped.
                engine._recorder.moves.clear()
                engine._recorder.stalls.clear()
                gc.collect()
                rss.append(psutil.Process().memory_info().rss)
                held.append(engine._resources.pool.usage().held_bytes)
        engine._resources.store.wait_for_writes()
        assert different == [], "steps whose gradients are not those of plain PyTorch"
        assert engine._resources.store.live_tickets == 0
        assert engine._resources.pool.usage().lent_bytes == 0
        metrics = {k.removeprefix("offload/activations/"): v for k, v in engine.metrics().items()}
        figures = {name: metrics[name] for name in ("written_bytes", "read_bytes", "missed_loads")}
        return {"rss": rss, "held": held, "loads": loads, **figures}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' malloc keeps what is freed")
def test_three_hundred_steps_leave_memory_flat(disk: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.activations.test_random_shapes", str(STEPS), str(disk)],
        cwd=ROOT,
        # With glibc's moving threshold freed activations stay in its heap and hide everything.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    seen: dict[str, Any] = json.loads(process.stdout)
    assert max(seen["held"]) <= 8 * MiB
    after_100, at_the_end = median(seen["rss"][8:13]), median(seen["rss"][-5:])
    assert at_the_end - after_100 < _GROWTH_BYTES, seen["rss"]
    assert seen["written_bytes"] > 120 * MiB
    assert seen["read_bytes"] > 120 * MiB
    # What was not fetched ahead is told: the first of each backward at least; most are.
    assert 0 < seen["missed_loads"] < seen["loads"] / 4


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]))))
