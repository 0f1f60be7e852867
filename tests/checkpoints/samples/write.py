"""Writes samples of all files of this version: ``python -m tests.checkpoints.samples.write``.

Run it once for each version that is published; the samples of earlier versions stay as they are.
"""

import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.optim import SGD

from offload_strategy import OffloadEngine, SSDOffloadStrategy
from offload_strategy.checkpoints import save
from offload_strategy.io.bandwidth.history import MeasuredRate, PathIdentity, save_rates
from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife, Update
from offload_strategy.telemetry import Direction
from tests.training import settings

SAMPLES = Path(__file__).parent
IDENTITY = PathIdentity("node7", "/mnt/nvme0", 12345, 2, "PosixBackend", 4)
RATES = {
    Direction.READ: MeasuredRate(2e9, "observed", 10**12, 7, "2026-11-25T00:00:00+00:00"),
    Direction.WRITE: MeasuredRate(1e9, "probe", 10**9),
}
PROFILE = Profile(
    forward_seconds=1.0,
    step_seconds=3.0,
    tensors=(TensorLife("relu", 4096, (0.5, 2.5), 0.75),),
    other_bytes=100,
    others=((0.0, 50), (1.0, 100)),
    updates=(Update(2.0, 0.5, 10, 20),),
    paths=(PathRates("nvme", 2e9, 1e9),),
)


def weight_sample() -> nn.Linear:
    model = nn.Linear(64, 8, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(512.0).view(8, 64))
    return model


class Sample:
    """A model whose gradients are ones, its optimizer, and how far it was trained."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.model = weight_sample()
        optimizer = SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.optimizer: Any = engine.attach(self.model, optimizer)

    def step(self) -> None:
        self.model(torch.ones(64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class LightningSample(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_sample()

    def training_step(self, _: Any) -> torch.Tensor:
        return self.inner(torch.ones(64)).sum()

    def configure_optimizers(self) -> SGD:
        return SGD(self.inner.parameters(), lr=0.5, momentum=0.5)

    def train_dataloader(self) -> list[int]:
        return [0, 1, 2]


def trained_by_lightning(disk: Path, steps: int, checkpoint: Path | None = None) -> Trainer:
    """Train the sample up to so many steps, from a checkpoint or from the beginning."""
    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = SSDOffloadStrategy(config=settings(disk))
    options = {"strategy": strategy, "accelerator": "cpu", "max_steps": steps}
    trainer = Trainer(**options, **dict.fromkeys(shown, False))
    trainer.fit(LightningSample(), ckpt_path=checkpoint)
    return trainer


def main() -> None:
    folder = SAMPLES / version("offload-strategy")
    folder.mkdir()
    with tempfile.TemporaryDirectory() as disk, OffloadEngine(settings(Path(disk))) as engine:
        sample = Sample(engine)
        for _ in range(2):
            sample.step()
        states = {"model": sample.model.state_dict(), "optimizer": sample.optimizer.state_dict()}
        save(states, folder / "checkpoint.pt")
        torch.save(states["optimizer"], folder / "optimizer.pt")
    with tempfile.TemporaryDirectory() as disk:
        trained_by_lightning(Path(disk), 2).save_checkpoint(folder / "lightning.ckpt")
    PROFILE.save(folder / "profile.json")
    os.environ["SSD_OFFLOAD_CACHE"] = str(folder / "cache")
    save_rates(IDENTITY, RATES)


if __name__ == "__main__":
    main()
