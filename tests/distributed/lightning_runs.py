"""What the ranks of `test_lightning_processes` do."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from offload_strategy.checkpoints import consolidate
from tests.distributed.data_parallel_runs import Net, config, same
from tests.distributed.sharded_runs import whole

_STRATEGIES = {
    "lightning.pytorch": "offload_strategy.integrations.lightning.for_lightning_pytorch",
    "pytorch_lightning": "offload_strategy.integrations.lightning.for_pytorch_lightning",
}


def against_plain(rank: int, directory: Path, family: str) -> list[dict[str, Any]]:
    """Two processes with "ddp" and with ours: accumulation, clipping, a checkpoint, resumed."""
    # The processes are there already: Lightning must not start any.
    os.environ["TORCHELASTIC_RUN_ID"] = "here"
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    pl: Any = importlib.import_module(family)
    integration = importlib.import_module(_STRATEGIES[family]).SSDOffloadStrategy

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()
            self.losses: list[str] = []

        def training_step(self, batch: Any) -> torch.Tensor:
            (tokens,) = batch
            logits = self.net(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.losses.append(loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

        def train_dataloader(self) -> Any:
            tokens = torch.randint(0, 96, (56, 17), generator=torch.Generator().manual_seed(1))
            return DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)

    def fit(strategy: Any, name: str, clip: float | None, resume: str | None) -> dict[str, Any]:
        pl.seed_everything(5, verbose=False)
        module = Module()
        trainer = pl.Trainer(
            strategy=strategy,
            devices=2,
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=3,
            gradient_clip_val=clip,
            logger=False,
            callbacks=[
                pl.callbacks.ModelCheckpoint(
                    directory / f"{name} {clip}", filename="{epoch}", save_top_k=-1
                )
            ],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = None if resume is None else directory / f"{resume} {clip}" / "epoch=0.ckpt"
        trainer.fit(module, ckpt_path=start)
        engine = getattr(trainer.strategy, "offload_engine", None)
        found = {
            "losses": module.losses[-7:],
            "weights": {key: value.clone() for key, value in module.state_dict().items()},
            "metrics": {} if engine is None else engine.metrics(),
            "class": type(trainer.strategy).__name__,
        }
        states = trainer.strategy.optimizer_state(trainer.optimizers[0])
        found["states"] = states if rank == 0 else {}
        if engine is not None:
            engine.close()
        return found

    found = []
    for clip in (None, 0.5):
        plain = fit("ddp", "plain", clip, None)
        for overlap in ("commit", "eager", "off"):
            if overlap == "eager" and clip is not None:
                continue
            for name, resume in (("ours", None), ("again", "ours"), ("of plain", "plain")):
                ours = fit(integration(config(directory, overlap)), name, clip, resume)
                keys = ("losses", "weights", "states") if rank == 0 else ("losses", "weights")
                found.append(
                    {
                        "case": [clip, overlap, name],
                        "differs": [key for key in keys if not same(plain[key], ours[key])],
                        "class": ours["class"],
                        "optimizer": ours["metrics"]["offload/optimizer/written_bytes"],
                        "activations": ours["metrics"]["offload/activations/written_bytes"],
                    }
                )
    dist.barrier()
    if rank == 0:
        for file in directory.glob("*/*.ckpt"):
            file.unlink()
    return found


def sharded_against_plain(rank: int, directory: Path, family: str) -> list[dict[str, Any]]:
    """Two processes with Lightning's model-parallel strategy and with ours; checkpoints too."""
    os.environ["TORCHELASTIC_RUN_ID"] = "here"
    os.environ.update(GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    pl: Any = importlib.import_module(family)

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()
            self.losses: list[str] = []

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            if not isinstance(self.net, FSDPModule):
                for block in (self.net.up, self.net.down, self.net.spare):
                    fully_shard(block, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any) -> torch.Tensor:
            (tokens,) = batch
            logits = self.net(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.losses.append(loss.item().hex())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            tokens = torch.randint(0, 96, (56, 17), generator=torch.Generator().manual_seed(1))
            return DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)

    def fit(strategy: Any, name: str, resume: str | None, one_file: bool) -> dict[str, Any]:
        pl.seed_everything(5, verbose=False)
        module = Module()
        folder = directory / f"{name} {one_file}"
        trainer = pl.Trainer(
            strategy=strategy,
            devices=2,
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            logger=False,
            callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        start = None if resume is None else directory / f"{resume} {one_file}" / "epoch=0.ckpt"
        trainer.fit(module, ckpt_path=start)
        engine = getattr(trainer.strategy, "offload_engine", None)
        found = {
            "losses": module.losses[-7:],
            "weights": whole(module.state_dict()),
            "states": whole(trainer.strategy.optimizer_state(trainer.optimizers[0])),
            "metrics": {} if engine is None else engine.metrics(),
            "class": type(trainer.strategy).__name__,
        }
        if engine is not None:
            engine.close()
        return found

    strategy_class = importlib.import_module(_STRATEGIES[family]).SSDOffloadFSDPStrategy
    found = []
    for one_file in (True, False):
        options: dict[str, Any] = {"save_distributed_checkpoint": not one_file}
        parallel = pl.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, **options
        )
        plain = fit(parallel, "plain", None, one_file)
        for overlap, name, resume in (
            ("commit", "ours", None),
            ("eager", "eager", None),
            ("commit", "again", "ours"),
            ("off", "of plain", "plain"),
        ):
            given = None if one_file else "ssd_offload_fsdp"  # by its name it saves folders
            os.environ["SSD_OFFLOAD_CONFIG"] = json.dumps(config(directory, overlap))
            ours = fit(given or strategy_class(**options), name, resume, one_file)
            keys = ("losses", "weights", "states")
            differs = [key for key in keys if not same(plain[key], ours[key])]
            found.append(
                {
                    "case": [one_file, overlap, name],
                    "differs": differs,
                    "class": ours["class"],
                    "optimizer": ours["metrics"]["offload/optimizer/written_bytes"],
                    "activations": ours["metrics"]["offload/activations/written_bytes"],
                }
            )
    if rank == 0:  # a folder of parts becomes what is saved in one file
        consolidate(directory / "ours False" / "epoch=0.ckpt", directory / "one.ckpt")
        one = torch.load(directory / "one.ckpt", weights_only=False)
        plain = torch.load(directory / "plain True" / "epoch=0.ckpt", weights_only=False)
        keys = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
        differs = [key for key in keys if not same(plain[key], one[key])]
        found.append({**found[-1], "case": ["consolidated"], "differs": differs})
    dist.barrier()
    return found
