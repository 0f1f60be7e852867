"""Short training runs through either Lightning, with everything that a comparison needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAMILIES = ("lightning.pytorch", "pytorch_lightning")

in_both_installs = pytest.mark.parametrize("family", FAMILIES, indirect=True)
"""For what may differ between the installs, whose code is the same."""

BATCHES = 10
WIDTH = 32


def tiny_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def batches(count: int = BATCHES, size: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count * size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.roll(1, dims=1)), batch_size=size)


def make_module(pl: Any, **options: Any) -> Any:
    """A LightningModule of an install; see `Behaviour` for the options."""
    cls = type("Module", (Behaviour, pl.LightningModule), {})
    torch.manual_seed(0)
    return cls(**options)


class Behaviour:
    """What the modules do, for either install's `LightningModule`.

    They train, validate, test and predict, log it, and have what finders look for.
    """

    def __init__(
        self,
        optimizer: Any = torch.optim.AdamW,
        scheduler: bool = False,
        manual: bool = False,
        fails_at: tuple[int, BaseException] | None = None,
    ) -> None:
        super().__init__()
        self.net = tiny_model()
        self.make_optimizer = optimizer
        self.scheduler = scheduler
        self.automatic_optimization = not manual
        self.fails_at = fails_at
        self.lr = 1e-2
        self.batch_size = 4
        self.losses: list[float] = []
        self.validation_losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails_at is not None and len(self.losses) == self.fails_at[0]:
            raise self.fails_at[1]
        loss = self.loss(batch)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self._step_by_hand(loss, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def _step_by_hand(self, loss: torch.Tensor, batch_idx: int) -> None:
        """Two optimizers in turns, and two micro-batches to a step, as nobody could foresee."""
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_losses.append(self.loss(batch).item())
        self.log("val_loss", self.validation_losses[-1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))
        self.log("inference", float(torch.is_inference_mode_enabled()))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(40 // self.batch_size, size=self.batch_size)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [
                self.make_optimizer(self.net[0].parameters(), lr=1e-2),
                self.make_optimizer(self.net[2:].parameters(), lr=1e-3),
            ]
        optimizer = self.make_optimizer(self.parameters(), lr=self.lr)
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def with_engine(module: Any, engine: Any) -> Any:
    """A module that attaches itself to an engine of its own."""
    module.configure_optimizers = lambda: engine.attach(
        module, torch.optim.AdamW(module.parameters(), lr=1e-2)
    )
    return module


@dataclass
class Run:
    """A finished run."""

    trainer: Any
    module: Any

    @property
    def losses(self) -> list[float]:
        return self.module.losses

    @property
    def validation_losses(self) -> list[float]:
        return self.module.validation_losses

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.module)

    @property
    def engine(self) -> Any:
        return self.trainer.strategy.offload_engine


def make_trainer(pl: Any, root: Path, strategy: Any = "auto", **options: Any) -> Any:
    return pl.Trainer(
        **{
            "strategy": strategy,
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 30,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(root),
            "log_every_n_steps": 1,
            **options,
        }
    )


def fit(
    pl: Any,
    root: Path,
    strategy: Any = "auto",
    module: Any = None,
    ckpt_path: Any = None,
    validate: bool = False,
    **options: Any,
) -> Run:
    module = make_module(pl) if module is None else module
    trainer = make_trainer(pl, root, strategy, **options)
    validation = batches(2) if validate else None
    trainer.fit(module, batches(), validation, ckpt_path=ckpt_path)
    return Run(trainer, module)


def with_and_without(run: Callable[[str], Run]) -> Run:
    """Check that a run with a strategy's name is the same with offload, and return that."""
    plain, offloaded = run("auto"), run("ssd_offload")
    assert_same(offloaded, plain)
    return offloaded


def assert_same(run: Any, other: Any) -> None:
    """Fail unless two runs, of Lightning or of Accelerate, agree to the last bit."""
    assert run.losses == other.losses
    assert run.validation_losses == other.validation_losses
    assert_equal(run.parameters, other.parameters)


def assert_equal(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    assert len(tensors) == len(others)
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0)


def strategy_class(family: str, name: str = "SSDOffloadStrategy") -> Any:
    """A class of ours for an install: a strategy, or another."""
    module = f"offload_strategy.integrations.lightning.for_{family.replace('.', '_')}"
    return getattr(importlib.import_module(module), name)
