"""What the ranks of `test_accelerate_processes` do."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy.integrations.accelerate import SSDOffloadPlugin, session_of
from tests.distributed.data_parallel_runs import Net, config, same


def loop(directory: Path, plugin: SSDOffloadPlugin | None, resume: bool = False) -> dict[str, Any]:
    """Train with accumulation, clipping and a scheduler; save in the middle.

    Args:
        directory: of the checkpoint.
        plugin: to offload with; None to train plainly.
        resume: load the checkpoint and do the second half only.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        kwargs_handlers=None if plugin is None else [plugin],
    )
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    tokens = torch.randint(0, 96, (96, 17), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    losses = []
    if resume:
        accelerator.load_state(directory)
    for epoch in (1,) if resume else (0, 1):
        if epoch == 1 and not resume:
            accelerator.save_state(directory)
            accelerator.wait_for_everyone()
        for (batch,) in loader:
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1])
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch[:, 1:].flatten()
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if epoch == 1:
                losses.append(loss.item().hex())
            del logits, loss
    metrics: dict[str, float] = {}
    session = session_of(accelerator)
    if session is not None:
        metrics = session.engine.metrics()
    found = {
        "losses": losses,
        "weights": {name: value.clone() for name, value in net.state_dict().items()},
        "states": optimizer.state_dict(),
        "metrics": metrics,
    }
    if session is not None:
        session.close()
    return found


def against_plain(rank: int, directory: Path) -> list[dict[str, Any]]:
    """Plain and offloaded loops, whole and resumed from the other's checkpoint."""
    shared = directory / "checkpoints"
    found = []
    plain = loop(shared / "plain", None)
    for overlap in ("commit", "off"):
        for name, resume in (("ours", False), ("ours", True), ("plain", True)):
            plugin = SSDOffloadPlugin(config(directory, overlap))
            ours = loop(shared / name, plugin, resume)
            keys = ("losses", "weights", "states")
            found.append(
                {
                    "case": [overlap, name, resume],
                    "differs": [key for key in keys if not same(plain[key], ours[key])],
                    "optimizer": ours["metrics"]["offload/optimizer/written_bytes"],
                    "activations": ours["metrics"]["offload/activations/written_bytes"],
                }
            )
    resumed = loop(shared / "ours", None, resume=True)
    keys = ("losses", "weights", "states")
    differs = [key for key in keys if not same(plain[key], resumed[key])]
    found.append({"case": ["plain of ours"], "differs": differs, "optimizer": 1, "activations": 1})
    PartialState().wait_for_everyone()
    if rank == 0:
        shutil.rmtree(shared)
    with contextlib.suppress(OSError):
        shared.rmdir()
    return found
