"""Lengths and branches that change with every step: never wrong, and memory stays flat."""

import gc
import json
import random
import sys
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.telemetry import Direction
from offload_strategy.units import MiB
from tests.integrations.support import python, succeeded
from tests.training import Block, bits, gradients, on_disk, settings

ROOT = Path(__file__).resolve().parents[2]
WIDTH, LONGEST, STEPS = 64, 192, 300
#: Of the process. A tensor that is lost in each step would take twice as much.
_GROWTH_BYTES = 5 * MiB


class Mixture(nn.Module):
    """Attention, experts that the data choose, and as many rounds of both as a coin says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, branch):
        if branch == "recurrent":
            return self.recurrent(x[:, :12])[0]  # hundreds of small saved tensors
        for _ in range(2 if branch == "twice" else 1):
            x = self.block(x)
            weights, chosen = self.router(x).softmax(-1).max(-1)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero(as_tuple=True)
                if len(rows[0]):  # an expert that nobody chose saves nothing
                    x = x.index_put(rows, expert(x[rows]) * weights[rows][:, None])
        return torch.tanh(x) if branch == "squashed" else x


def gradients_of(model, step, engine=None):
    """Of a step whose length and branch come of its number."""
    chance = random.Random(step)
    torch.manual_seed(step)
    x = torch.randn(2, chance.randint(1, LONGEST), WIDTH)
    model.zero_grad()
    loss = model(x, chance.choice(("once", "twice", "recurrent", "squashed"))).pow(2).mean()
    if engine is not None and step % 3 == 0:
        on_disk(engine)
    loss.backward()
    return {name: bits(value) for name, value in gradients(model).items()}


def run(engine):
    """Train, and compare some steps with plain PyTorch; returns memory and counts on the way."""
    model, twin = Mixture(), Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine.attach(model)
    rss, held, loads = [], [], 0
    for step in range(STEPS):
        got = gradients_of(model, step, engine)
        if step % 25 == 0:
            twin.load_state_dict(model.state_dict())
            assert got == gradients_of(twin, step), f"step {step} differs from plain PyTorch"
        optimizer.step()
        if step % 10 == 9:
            loads += sum(move.direction == Direction.READ for move in tuple(engine._recorder.moves))
            # The records of moves fill for a thousand steps before the oldest are dropped.
            engine._recorder.moves.clear()
            engine._recorder.stalls.clear()
            gc.collect()
            rss.append(psutil.Process().memory_info().rss)
            held.append(engine._resources.pool.usage().held_bytes)
    on_disk(engine)
    assert engine._resources.store.registry.live == 0
    assert engine._resources.pool.usage().lent_bytes == 0
    metrics = {key.removeprefix("offload/activations/"): v for key, v in engine.metrics().items()}
    return {"rss": rss, "held": held, "loads": loads, **metrics}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' malloc keeps what is freed")
def test_three_hundred_steps_leave_memory_flat(disk):
    # With glibc's moving threshold freed activations stay in its heap and hide everything.
    options = {"home": ROOT, "variables": {"MALLOC_MMAP_THRESHOLD_": "65536"}, "timeout": 300}
    module = "tests.activations.test_random_shapes"
    seen = json.loads(succeeded(python("-m", module, str(disk), **options)))
    assert max(seen["held"]) <= 8 * MiB
    after_100, at_the_end = median(seen["rss"][8:13]), median(seen["rss"][-5:])
    assert at_the_end - after_100 < _GROWTH_BYTES, seen["rss"]
    assert min(seen["written_bytes"], seen["read_bytes"]) > 120 * MiB
    # What was not fetched ahead is told: the first of each backward at least; most are.
    assert 0 < seen["missed_loads"] < seen["loads"] / 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    # As much as a few steps need: more would fill for a while, with buffers of ever new sizes.
    config = settings(Path(sys.argv[1]), optimizer={"enabled": False}, memory={"pinned": "8MiB"})
    with OffloadEngine(config) as offloading:
        print(json.dumps(run(offloading)))
