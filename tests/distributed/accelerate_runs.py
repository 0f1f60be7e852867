"""What the ranks of `test_ranks` do."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin, session_of
from tests.distributed.data_parallel_runs import Net, compared, config, different, loss_of, whole
from tests.distributed.sharded_runs import STREAMED


def make_accelerator(sharded: bool, **options: Any) -> Accelerator:
    """An Accelerator on the CPU.

    Accelerate shards on accelerators alone, and ignores FSDP here. Its code runs all the same once
    its state says so.
    """
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, **options)
    if sharded:
        for state in (accelerator.state, PartialState()):  # the one copies from the other
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="no_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
        )
    return accelerator


def loop(
    directory: Path,
    plugin: SSDOffloadPlugin | None,
    resume: bool = False,
    sharded: bool = False,
    batch: int = 4,
) -> dict[str, Any]:
    """Train with accumulation, clipping and a scheduler; save in the middle, or resume from there.

    With FSDP version 2 if it is sharded, else with DistributedDataParallel.
    """
    accelerator = make_accelerator(
        sharded,
        gradient_accumulation_steps=3,
        kwargs_handlers=None if plugin is None else [plugin],
    )
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    tokens = torch.randint(0, 96, (48, 17), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=batch)
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
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if epoch == 1:
                losses.append(loss.item().hex())
            del loss
    metrics: dict[str, float] = {}
    session = session_of(accelerator)
    if session is not None:
        metrics = session.engine.metrics()
    found = {
        "losses": losses,
        "weights": whole({name: value.clone() for name, value in net.state_dict().items()}),
        "states": whole(optimizer.state_dict()),
        "metrics": metrics,
    }
    if session is not None:
        session.close()
    return found


def all_runs(rank: int, directory: Path) -> list[list[dict[str, Any]]]:
    """What a rank of `test_ranks` does."""
    return [against_plain(rank, directory, sharded) for sharded in (False, True)]


def against_plain(rank: int, directory: Path, sharded: bool) -> list[dict[str, Any]]:
    """Plain and offloaded loops, whole and resumed from the other's checkpoint."""
    shared = directory / "checkpoints"
    found = []
    plain = loop(shared / "plain", None, sharded=sharded)
    for overlap, name, resume in (
        ("commit", "ours", False),
        ("off", "ours", True),
        ("commit", "plain", True),
    ):
        settings = config(directory, overlap)
        if sharded and resume:
            settings["parameters"] = STREAMED
        ours = loop(shared / name, SSDOffloadPlugin(settings), resume, sharded)
        found.append(compared([overlap, name, resume], plain, ours))
        found[-1]["streamed"] = ours["metrics"].get("offload/parameters/written_bytes", 0)
    resumed = loop(shared / "ours", None, resume=True, sharded=sharded)
    differs = [each for each in different(plain, resumed) if each != "states"]
    found.append({"case": ["plain of ours"], "differs": differs, "optimizer": 1, "activations": 1})
    PartialState().wait_for_everyone()
    if rank == 0:
        shutil.rmtree(shared, ignore_errors=True)
    with contextlib.suppress(OSError):
        shared.rmdir()
    return found
