"""Training whose every step has another length and branch, for test_random_shapes.py."""

from __future__ import annotations

import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from offload_strategy.telemetry import Direction
from tests.training import bits, gradients, settings

WIDTH = 64
LONGEST = 192


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


BRANCHES = ("once", "twice", "recurrent", "squashed")


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Of one step; its length and its branch come of its number."""
    chance = random.Random(step)
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, chance.randint(1, LONGEST), WIDTH, generator=generator)
    return model(x, chance.choice(BRANCHES)).pow(2).mean()


def _same_as_plain(model: nn.Module, twin: nn.Module, step: int) -> bool:
    twin.load_state_dict(model.state_dict())
    twin.zero_grad()
    loss_of(twin, step).backward()
    got, expected = gradients(model), gradients(twin)
    return got.keys() == expected.keys() and all(bits(got[k]) == bits(expected[k]) for k in got)


def run(
    steps: int,
    directory: Path,
    host: str | None = None,
    compare_every: int = 25,
    **options: Any,
) -> dict[str, Any]:
    """Train, and note what memory, tickets and metrics are like on the way.

    Args:
        steps: how many.
        directory: of the ssd tier.
        host: capacity of a dram tier before it; None for none.
        compare_every: as many steps lie between those that are compared with plain PyTorch.
        options: of activations.
    """
    torch.set_num_threads(1)
    # As much as a few steps need: more would fill for a while, with buffers of ever new sizes.
    memory = {"pinned": "8MiB"}
    off = {"enabled": False}
    config = settings(directory, host, activations=options, optimizer=off, memory=memory)
    model, twin = Mixture(), Mixture()
    rss: list[int] = []
    held: list[int] = []
    different: list[int] = []
    loads = 0
    with OffloadEngine(config) as engine:
        engine.attach(model)
        for step in range(steps):
            model.zero_grad()
            loss = loss_of(model, step)
            if step % 3 == 0:
                engine._resources.store.wait_for_writes()
            loss.backward()
            del loss
            if step % compare_every == 0 and not _same_as_plain(model, twin, step):
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
        return {
            "rss": rss,
            "held": held,
            "different": different,
            "loads": loads,
            "tickets": engine._resources.store.live_tickets,
            "lent": engine._resources.pool.usage().lent_bytes,
            "metrics": {k: v for k, v in engine.metrics().items() if v == v},
        }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))))
