"""Short training runs through either Lightning, with everything that a comparison needs."""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.activations.support import noise
from tests.training import left_bytes

FAMILIES = ("lightning.pytorch", "pytorch_lightning")

in_both_installs = pytest.mark.parametrize("family", FAMILIES, indirect=True)
"""For what may differ between the installs, whose code is the same."""

WIDTH = 32


def tiny_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in module.parameters()]


def batches(count: int = 10, size: int = 16) -> DataLoader[Any]:
    inputs = noise(count * size, WIDTH, seed=1)
    return DataLoader(TensorDataset(inputs, inputs.roll(1, dims=1)), batch_size=size)


def make_module(pl: Any, behaviour: type | None = None, **options: Any) -> Any:
    """A LightningModule, always with the same weights; see `Behaviour` for the options."""
    cls = type("Module", (behaviour or Behaviour, pl.LightningModule), {})
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

    def test_step(self, batch, batch_idx):
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


@dataclass
class Run:
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
    trainer.fit(module, batches(), batches(2) if validate else None, ckpt_path=ckpt_path)
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
    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0)


def strategy_class(family: str, name: str = "SSDOffloadStrategy") -> Any:
    """A class of ours for an install: a strategy, or another."""
    module = f"offload_strategy.integrations.lightning.for_{family.replace('.', '_')}"
    return getattr(importlib.import_module(module), name)


class Session:
    """Trains with our strategy, or with "auto" if there is no `overlap`."""

    def __init__(self, directory: Path, overlap: str | None) -> None:
        self.pl = pytest.importorskip(FAMILIES[0])
        self.overlap = overlap
        self.root = directory / (overlap or "auto")
        self.root.mkdir()
        self.trainers: list[Any] = []
        self.modules: list[Any] = []

    def module(self, behaviour: type = Behaviour, **options: Any) -> Any:
        self.modules.append(make_module(self.pl, behaviour, **options))
        return self.modules[-1]

    def trainer(self, **options: Any) -> Any:
        strategy: Any = "auto"
        if self.overlap:
            activations = {"min_size": "1KiB", "budget": "100%"}
            config = {"activations": activations, "optimizer": {"overlap": self.overlap}}
            strategy = strategy_class(FAMILIES[0])(config=config)
        options = {"max_steps": 10, **options}
        self.trainers.append(make_trainer(self.pl, self.root, strategy, **options))
        return self.trainers[-1]

    def fit(self, module: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
        """Train on ten batches an epoch, with two to validate on."""
        module = self.module() if module is None else module
        trainer = self.trainer(**options)
        trainer.fit(module, batches(), batches(2), ckpt_path=ckpt_path)
        return trainer, module

    def outcome(self, trainer: Any, module: Any, **more: Any) -> dict[str, Any]:
        """What every run is compared by."""
        return {
            # Text, as no NaN is equal to another one.
            "losses": list(map(float.hex, module.losses)),
            "validation losses": list(map(float.hex, module.validation_losses)),
            "parameters": parameters_of(module),
            "logged": dict(trainer.logged_metrics),
            "progress bar": {name: repr(it) for name, it in trainer.progress_bar_metrics.items()},
            "callbacks": dict(trainer.callback_metrics),
            "steps": (trainer.global_step, trainer.current_epoch),
            "lr": [group["lr"] for each in trainer.optimizers for group in each.param_groups],
            **more,
        }

    def moved_bytes(self, client: str) -> float:
        """Bytes that left, of all runs."""
        engines = [getattr(trainer.strategy, "offload_engine", None) for trainer in self.trainers]
        return sum(left_bytes(each.metrics(), client) for each in engines if each is not None)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's notes and advice."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)  # which forgets what the logger has cached of its level
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
