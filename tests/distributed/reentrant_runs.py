"""What ranks of `test_ranks` do: passes within passes, with DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine
from tests.distributed.data_parallel_runs import compared, config

WIDTH = 64


class Net(nn.Module):
    """Blocks that are recomputed; if it has `ends`, between layers that are not."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH) if ends else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, WIDTH) if ends else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)


def train(rank: int, engine: OffloadEngine | None, ends: bool, **ddp: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net(ends)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **ddp)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    data = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, generator=data).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "states": optimizer.state_dict(),
        "metrics": {} if engine is None else engine.metrics(),
    }


def against_plain(rank: int, directory: Path) -> list[dict[str, Any]]:
    """With and without layers around the blocks, and with options of DistributedDataParallel."""
    found = []
    for ends, ddp, overlaps in (
        (True, {}, ("commit", "eager", "off")),
        (False, {"static_graph": True}, ("commit",)),
        (False, {"gradient_as_bucket_view": True}, ("eager",)),
    ):
        plain = train(rank, None, ends, **ddp)
        for overlap in overlaps:
            with OffloadEngine(config(directory, overlap)) as engine:
                ours = train(rank, engine, ends, **ddp)
            found.append(compared([ends, ddp, overlap], plain, ours))
            del ours
    return found
