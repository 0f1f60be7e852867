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

import torch.distributed as dist
from torch import nn

from offload_strategy import OffloadEngine, load, save
from tests.distributed.data_parallel_runs import config, different
from tests.distributed.data_parallel_runs import train as run
from tests.distributed.doomed import launch

STEPS, EVERY, KILLED_AFTER = 8, 3, 4


def train(engine: OffloadEngine | None, checkpoint: Path, doomed: bool) -> dict[str, Any]:
    """Train to the end, from the checkpoint if there is one."""
    rank = dist.get_rank()
    saved = load(checkpoint) if checkpoint.exists() else None
    first = 0 if saved is None else saved["step"]

    def after(step: int, net: nn.Module, optimizer: Any) -> None:
        if doomed and step == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        if engine is not None and (step + 1) % EVERY == 0:
            states = optimizer.state_dict()
            if rank == 0:
                state = {"step": step + 1, "model": net.state_dict(), "optimizer": states}
                save(state, checkpoint)
            dist.barrier()

    steps = range(first, STEPS)
    return {**run(rank, engine, states=saved, steps=steps, after=after), "first": first}


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
