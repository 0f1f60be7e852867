"""A rank of two machines that train one sharded model: what torchrun starts for `machines`.

    torchrun ... -m benchmarks.distributed.machine_rank FOLDER STEPS

The ranks of a machine shard weights and states, and the machines have a copy each (HSDP). Each
machine has a folder for its tier, and nothing but messages and checkpoints is shared.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload_strategy import OffloadEngine

_WIDTH, _LAYERS = 256, 4


def main(folder: Path, steps: int) -> None:
    """Train from the last complete checkpoint on, with a checkpoint after each step."""
    rank, machine = int(os.environ["RANK"]), os.environ["GROUP_RANK"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (folder / f"process-{rank}").write_text(str(os.getpid()))
    tier = folder / f"machine-{machine}"
    tier.mkdir(exist_ok=True)
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS))
    net = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "ranks"))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    config = {
        "tiers": [{"name": "disk", "kind": "ssd", "path": str(tier), "capacity": "256MiB"}],
        "activations": {"min_size": "1KiB", "budget": "100%"},
        "optimizer": {"subgroup_size": 5000},
        "parameters": {"enabled": True, "min_size": "1KiB"},
    }
    with OffloadEngine(config) as engine:
        optimizer: Any = engine.attach(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

        def states() -> dict[str, Any]:
            return {
                "model": get_model_state_dict(net),
                "optimizer": get_optimizer_state_dict(net, optimizer),
            }

        done = sorted(int(mark.name[5:]) for mark in folder.glob("done-*"))
        first = done[-1] + 1 if done else 0
        if done:
            loaded = states()
            load(loaded, checkpoint_id=folder / f"step-{done[-1]}")
            set_model_state_dict(net, loaded["model"])
            set_optimizer_state_dict(net, optimizer, loaded["optimizer"])
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(100 * step + rank)
            net(torch.randn(16, _WIDTH, generator=generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            save(states(), checkpoint_id=folder / f"step-{step}")
            dist.barrier()
            if rank == 0:
                (folder / f"done-{step}").touch()
        digest = hashlib.sha256()
        for value in get_model_state_dict(net).values():
            digest.update(value.full_tensor().contiguous().numpy().tobytes())
        if rank == 0:
            (folder / "digest").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
