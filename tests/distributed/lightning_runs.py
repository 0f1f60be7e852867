"""What the ranks of `test_ranks` do."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy.checkpoints import consolidate
from tests.distributed.data_parallel_runs import Net, compared, config, loss_of, same, whole
from tests.distributed.sharded_runs import STREAMED
from tests.integrations.lightning_runs import FAMILIES, strategy_class


class Behaviour:
    """A net, its loss and its data, for either install's `LightningModule`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.losses: list[str] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        loss = loss_of(self.net, tokens)
        self.losses.append(loss.item().hex())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Any:
        tokens = torch.randint(0, 96, (56, 17), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)


class Sharded(Behaviour):
    """The same with FSDP2."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net, FSDPModule):
            for block in (self.net.up, self.net.down, self.net.spare):
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


def fit(
    family: str,
    behaviour: type,
    strategy: Any,
    folder: Path,
    resume: Path | None,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs with accumulation, or the second from a checkpoint of the first."""
    pl = importlib.import_module(family)
    pl.seed_everything(5, verbose=False)
    module = type("Module", (behaviour, pl.LightningModule), {})()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=3,
        logger=False,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, ckpt_path=None if resume is None else resume / "epoch=0.ckpt")
    engine = getattr(trainer.strategy, "offload_engine", None)
    states = whole(trainer.strategy.optimizer_state(trainer.optimizers[0]))
    sharded = behaviour is Sharded
    found = {
        "class": type(trainer.strategy).__name__,
        "losses": module.losses[-7:],
        "weights": whole({key: value.clone() for key, value in module.state_dict().items()}),
        "states": states if sharded or trainer.is_global_zero else {},
        "metrics": {} if engine is None else engine.metrics(),
    }
    if engine is not None:
        engine.close()
    return found


def _compared(plain: dict[str, Any], ours: dict[str, Any], *case: Any) -> dict[str, Any]:
    return compared(case, {**plain, "class": ours["class"]}, ours, **{"class": ours["class"]})


def all_runs(rank: int, directory: Path) -> list[list[dict[str, Any]]]:
    """What a rank of `test_ranks` does; the second install gets a short run."""
    found = []
    for name, run, short in (
        ("whole", against_plain, False),
        ("sharded", sharded_against_plain, False),
        ("short", against_plain, True),
    ):
        place = directory / name
        place.mkdir(exist_ok=True)
        found.append(run(rank, place, FAMILIES[short], short))
    return found


def against_plain(rank: int, directory: Path, family: str, short: bool) -> list[dict[str, Any]]:
    """Two processes with "ddp" and with ours: accumulation, clipping, a checkpoint, resumed."""
    ours_of = strategy_class(family)
    found = []
    runs = {
        0.5: [("commit", "ours", None), ("off", "again", "ours"), ("commit", "of plain", "plain")],
        None: [("eager", "eager", None)],
    }
    if short:
        runs = {0.5: runs[0.5][:1]}
    for clip, cases in runs.items():
        options = {"gradient_clip_val": clip}
        place = directory / str(clip)
        plain = fit(family, Behaviour, "ddp", place / "plain", None, **options)
        for overlap, name, source in cases:
            resume = None if source is None else place / source
            given = ours_of(config(directory, overlap))
            ours = fit(family, Behaviour, given, place / name, resume, **options)
            found.append(_compared(plain, ours, clip, overlap, name))
    files = [directory / "0.5" / name / "epoch=0.ckpt" for name in ("plain", "ours")]
    one, other = (torch.load(file, weights_only=False) for file in files)
    differs = [key for key in one if key != "callbacks" and not same(one[key], other[key])]
    found.append({**found[0], "case": ["the file"], "differs": differs})
    dist.barrier()
    if rank == 0:
        for file in directory.glob("*/*/*.ckpt"):
            file.unlink()
    return found


def sharded_against_plain(
    rank: int, directory: Path, family: str, short: bool
) -> list[dict[str, Any]]:
    """Two processes with Lightning's model-parallel strategy and with ours; checkpoints too."""
    pl = importlib.import_module(family)
    ours_of = sys.modules[strategy_class(family).__module__].SSDOffloadFSDPStrategy
    found = []
    runs = {
        True: [("off", "ours", None), ("eager", "again", "ours")],
        False: [("commit", "ours", None), ("commit", "of plain", "plain")],
    }
    for one_file, cases in runs.items():
        place = directory / str(one_file)
        options: dict[str, Any] = {"save_distributed_checkpoint": not one_file}
        parallel = pl.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, **options
        )
        plain = fit(family, Sharded, parallel, place / "plain", None)
        for overlap, name, source in cases:
            given = None if one_file else "ssd_offload_fsdp"  # by its name it saves folders
            settings = config(directory, overlap)
            if name == "again":  # from a checkpoint without streamed weights
                settings["parameters"] = STREAMED
            os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(settings)
            resume = None if source is None else place / source
            ours = fit(family, Sharded, given or ours_of(**options), place / name, resume)
            found.append(_compared(plain, ours, one_file, overlap, name))
            found[-1]["streamed"] = ours["metrics"].get("offload/parameters/written_bytes", 0)
    if rank == 0:  # a folder of parts becomes what is saved in one file
        consolidate(directory / "False" / "ours" / "epoch=0.ckpt", directory / "one.ckpt")
        one = torch.load(directory / "one.ckpt", weights_only=False)
        plain = torch.load(directory / "True" / "plain" / "epoch=0.ckpt", weights_only=False)
        keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        differs = [key for key in keys if not same(plain[key], one[key])]
        found.append({**found[-1], "case": ["consolidated"], "differs": differs})
    dist.barrier()
    return found
