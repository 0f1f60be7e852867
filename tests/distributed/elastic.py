"""What `test_deaths` runs: training that torchrun restarts.

A rank is killed between two checkpoints; the ranks that torchrun starts again go on from the last
one. Then the same steps are trained without offload and without an interruption, to compare.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offload_strategy import OffloadEngine, load, save
from tests.distributed.data_parallel_runs import Net, config, different, loss_of
from tests.distributed.doomed import launch

STEPS, EVERY, KILLED_AT = 8, 3, 5


def train(engine: OffloadEngine | None, checkpoint: Path, doomed: bool) -> dict[str, Any]:
    """Train to the end, from the checkpoint if there is one."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if engine is not None:
        optimizer = engine.attach(model, optimizer)
    first = 0
    if checkpoint.exists():
        saved = load(checkpoint)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    losses = []
    for step in range(first, STEPS):
        data = torch.Generator().manual_seed(2 * step + rank)
        tokens = torch.randint(0, 96, (4, 17), generator=data)
        loss = loss_of(model, tokens)
        loss.backward()
        if doomed and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        del loss
        if engine is not None and (step + 1) % EVERY == 0:
            states = optimizer.state_dict()
            if rank == 0:
                saved = {"step": step + 1, "model": net.state_dict(), "optimizer": states}
                save(saved, checkpoint)
            del states
            dist.barrier()
    return {
        "first": first,
        "losses": losses,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "states": optimizer.state_dict(),
    }


def restarted(rank: int, directory: Path, tier: str) -> None:
    """Start two ranks, and again after one was killed."""
    launch(2, 1, train_and_compare, Path(tier), directory)


def train_and_compare(tier: Path, notes: Path) -> None:
    """Train, be killed, train again, and compare."""
    dist.init_process_group("gloo")
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with OffloadEngine(config(tier, "commit")) as engine:
        ours = train(engine, notes / "last.ckpt", doomed=rank == 1 and restarts == 0)
        moved = engine.metrics()["offload/optimizer/written_bytes"]
    plain = train(None, notes / "none", doomed=False)
    first = ours["first"]
    plain["losses"] = plain["losses"][first:]
    differs = [key for key in different(plain, ours) if key != "first"]
    found = {"restarts": restarts, "first": first, "moved": moved, "differs": differs}
    (notes / f"found-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()
