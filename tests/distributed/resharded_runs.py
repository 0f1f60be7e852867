"""What the ranks of `test_ranks` do.

Each kind of training saves with and without offload; what either saved is loaded with either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy import OffloadEngine, load, save
from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin
from offload_strategy.integrations.lightning.for_lightning_pytorch import SSDOffloadStrategy
from tests.distributed import accelerate_runs
from tests.distributed.data_parallel_runs import Net, config, loss_of

#: Samples of a step, of all ranks together.
BATCH = 8
TOKENS = torch.randint(0, 96, (48, 17), generator=torch.Generator().manual_seed(1))


def digest(value: Any) -> str:
    """A hash of nested values, to the last bit."""
    made = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            made.update(f"{part.dtype}{tuple(part.shape)}".encode())
            made.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:  # in their order, which is a part of it
                made.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            made.update(repr(len(part)).encode())
            for item in part:
                add(item)
        else:
            made.update(repr(part).encode())

    add(value)
    return made.hexdigest()


@contextlib.contextmanager
def offloaded(tier: Path, offload: bool) -> Iterator[OffloadEngine | None]:
    if not offload:
        yield None
        return
    with OffloadEngine(config(tier, "commit")) as engine:
        yield engine


def loop(
    rank: int, size: int, tier: Path, offload: bool, source: Path | None, target: Path | None
) -> dict[str, Any]:
    """Plain PyTorch: three steps, from a checkpoint or to one."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net) if size > 1 else net
    with offloaded(tier, offload) as engine:
        optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        if source is not None:
            saved = load(source) if offload else torch.load(source)
            net.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        losses = []
        for step in range(3):
            first = step * BATCH + rank * BATCH // size
            loss = loss_of(model, TOKENS[first : first + BATCH // size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        del loss
        if target is not None:
            if engine is not None:  # as code does that asks rank 0 alone
                optimizer.consolidate_state_dict()
            if rank == 0:
                saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                (save if offload else torch.save)(saved, target)
            dist.barrier()
        return {
            "losses": losses,
            "weights": digest(net.state_dict()),
            "states": digest(optimizer.state_dict()) if rank == 0 or target is None else "",
            "moved": moved({} if engine is None else engine.metrics()),
        }


def accelerate(
    rank: int, size: int, tier: Path, offload: bool, source: Path | None, target: Path | None
) -> dict[str, Any]:
    """Accelerate: `save_state` in the middle, or the second half after `load_state`."""
    plugin = SSDOffloadPlugin(config(tier, "commit")) if offload else None
    checkpoint = source or target
    assert checkpoint is not None
    found = accelerate_runs.loop(checkpoint, plugin, source is not None, batch=8 // size)
    return {
        "losses": found["losses"],
        "weights": digest(found["weights"]),
        "states": digest(found["states"]),
        "moved": moved(found["metrics"]),
    }


class Module(pl.LightningModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.batch = batch
        self.losses: list[str] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(TOKENS), batch_size=self.batch)


def lightning(
    rank: int, size: int, tier: Path, offload: bool, source: Path | None, target: Path | None
) -> dict[str, Any]:
    """Lightning: an epoch and its checkpoint, or the second epoch after `ckpt_path`."""
    strategy: Any = "auto" if size == 1 else "ddp"
    if offload:
        strategy = SSDOffloadStrategy(config(tier, "commit"))
    module = Module(BATCH // size)
    callbacks = []
    if target is not None:
        callbacks = [pl.callbacks.ModelCheckpoint(target.parent, filename=target.stem)]
    trainer = pl.Trainer(
        strategy=strategy,
        devices=size,
        accelerator="cpu",
        max_epochs=1 if source is None else 2,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, ckpt_path=source)
    engine = getattr(trainer.strategy, "offload_engine", None)
    states = trainer.strategy.optimizer_state(trainer.optimizers[0])
    found = {
        "losses": module.losses,
        "weights": digest(module.state_dict()),
        "states": digest(states) if rank == 0 else "",
        "moved": moved({} if engine is None else engine.metrics()),
    }
    if engine is not None:
        engine.close()
    return found


def moved(metrics: dict[str, float]) -> list[float]:
    """Bytes written of activations and of states; none without offload."""
    clients = ("activations", "optimizer")
    return [metrics[f"offload/{client}/written_bytes"] for client in clients] if metrics else []


KINDS = {"loop": loop, "accelerate": accelerate, "lightning": lightning}


def everything(rank: int, directory: Path, sources: list[bool | None]) -> dict[str, Any]:
    """What a rank of `test_ranks` does, with what it found by run."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    for kind, train in KINDS.items():
        for offload, saved in kinds_of_runs(size, kind, sources):
            source = None if saved is None else directory / f"{kind}-{saved}.ckpt"
            target = directory / f"{kind}-{offload}.ckpt" if saved is None else None
            run = train(rank, size, directory / "tier", offload, source, target)
            found[json.dumps([kind, offload, saved])] = run
    return found


def kinds_of_runs(
    size: int, kind: str, sources: list[bool | None]
) -> list[tuple[bool, bool | None]]:
    """With offload or not, and what the checkpoint was saved with; frameworks leave four out."""
    if None in sources:
        return [(False, None), (True, None)]
    return [(False, False), (False, True), (True, False)] if size == 1 or kind == "loop" else []


def same_files(directory: Path) -> bool:
    """Whether checkpoints with and without offload have the same keys and values."""
    for kind in ("loop", "lightning"):
        plain, ours = (torch.load(directory / f"{kind}-{each}.ckpt") for each in (False, True))
        for saved in (plain, ours):
            saved.pop("callbacks", None)  # where their files are
        if digest(plain) != digest(ours):
            return False
    return True
