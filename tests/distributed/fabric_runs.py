"""What the ranks of `test_ranks` do: Fabric with two devices."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy import ConfigError
from tests.distributed.data_parallel_runs import Net, compared, config, loss_of, same, whole

FAMILIES = ("lightning.fabric", "lightning_fabric")


def fit(family: str, strategy: Any, file: Path, resume: Path | None, clip: bool) -> dict[str, Any]:
    """Train with accumulation, save in the middle, or go on from a file of the middle."""
    fabric = importlib.import_module(family).Fabric(strategy=strategy, devices=2, accelerator="cpu")
    fabric.launch()
    torch.manual_seed(0)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    tokens = torch.randint(0, 96, (48, 17), generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(tokens), batch_size=4))
    losses = []
    if resume is not None:
        fabric.load(resume, {"model": model, "optimizer": optimizer})
    for epoch in (0, 1) if resume is None else (1,):
        if epoch == 1 and resume is None:
            fabric.save(file, {"model": model, "optimizer": optimizer})
        for index, (batch,) in enumerate(loader, start=1):
            with fabric.no_backward_sync(model, enabled=index % 3 > 0):
                loss = loss_of(model, batch)
                fabric.backward(loss)
            if epoch == 1:
                losses.append(loss.item().hex())
            del loss
            if index % 3 == 0:
                if clip:
                    fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    engine = getattr(fabric.strategy, "offload_engine", None)
    states = whole(optimizer.state_dict())
    found = {
        "class": type(fabric.strategy).__name__,
        "losses": losses,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        # Fabric asks optimizers whose states are shared by ranks on the first rank alone.
        "states": states if fabric.is_global_zero else {},
        "metrics": {} if engine is None else engine.metrics(),
    }
    if engine is not None:
        fabric.strategy.teardown()
    return found


def against_plain(rank: int, directory: Path) -> list[dict[str, Any]]:
    """Both Fabrics, with DDP and with ours: from the start, and from each other's file."""
    found = []
    for family in FAMILIES:
        place = directory / family
        clip = family == FAMILIES[0]
        plain = fit(family, "ddp", place / "plain", None, clip)
        for overlap, name, resume in (
            ("commit" if clip else "eager", "ours", None),
            ("off", "of plain", "plain"),
            ("commit", "again", "ours"),
        ):
            # The registered name is that of a strategy for one device, which becomes another one.
            os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(config(directory, overlap))
            source = None if resume is None else place / resume
            ours = fit(family, "ssd_offload", place / name, source, clip)
            both = {**plain, "class": ours["class"]}
            found.append(compared([family, name], both, ours, **{"class": ours["class"]}))
        files = [torch.load(place / name, weights_only=False) for name in ("plain", "ours")]
        found[-1]["files"] = same(*files)
        dist.barrier()
    os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps({"parameters": {"enabled": True}})
    with pytest.raises(ConfigError, match="ssd_offload_fsdp"):
        importlib.import_module(family).Fabric(strategy="ssd_offload", devices=2, accelerator="cpu")
    return found
