"""What is needed to compare a feature of Lightning with and without offload.

A feature is a function of a `Session`, which makes Trainers with one strategy, and returns all that
a user can see of it: losses, parameters, what was logged, what callbacks found. Nothing of it may
depend on times or on paths. `test_lightning_features` has them all.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integrations.lightning_runs import (
    Behaviour,
    batches,
    make_trainer,
    parameters_of,
    strategy_class,
)
from tests.training import left_bytes

FAMILY = "lightning.pytorch"

Outcome = dict[str, Any]


class Session:
    """Trains with one strategy.

    Args:
        pl: an install of Lightning.
        root: a directory of its own.
        config: of the offload; None for ``strategy="auto"``.
    """

    def __init__(self, pl: Any, root: Path, config: Mapping[str, Any] | None) -> None:
        self.pl = pl
        self.root = root
        self.config = config
        self._trainers: list[Any] = []
        self._modules: list[Any] = []

    def module(self, behaviour: type = Behaviour, **options: Any) -> Any:
        """A module; the weights are always the same."""
        torch.manual_seed(0)
        made = type("Module", (behaviour, self.pl.LightningModule), {})(**options)
        self._modules.append(made)
        return made

    @property
    def steps(self) -> int:
        """Training steps that were begun."""
        return sum(len(module.losses) for module in self._modules)

    def trainer(self, **options: Any) -> Any:
        strategy = "auto" if self.config is None else strategy_class(FAMILY)(config=self.config)
        trainer = make_trainer(self.pl, self.root, strategy, **{"max_steps": 10, **options})
        self._trainers.append(trainer)
        return trainer

    def fit(self, module: Any = None, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
        """Train on ten batches an epoch, with two to validate on."""
        module = self.module() if module is None else module
        trainer = self.trainer(**options)
        trainer.fit(module, batches(), batches(2), ckpt_path=ckpt_path)
        return trainer, module

    def outcome(self, trainer: Any, module: Any, **more: Any) -> Outcome:
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
        engines = [getattr(trainer.strategy, "offload_engine", None) for trainer in self._trainers]
        return sum(left_bytes(each.metrics(), client) for each in engines if each is not None)


@dataclass(frozen=True)
class Feature:
    """A row of the table.

    Args:
        name: as users know it.
        run: does it.
        refused_with_eager: what the error says with ``overlap: eager``; None where that works.
        before_training: whether that is raised before the first training step.
        trains: whether anything is to be moved.
    """

    name: str
    run: Callable[[Session], Outcome]
    refused_with_eager: str | None = None
    before_training: bool = True
    trains: bool = True


FEATURES: dict[str, Feature] = {}


def feature(name: str, **options: Any) -> Callable[[Callable[[Session], Outcome]], Any]:
    def add(run: Callable[[Session], Outcome]) -> Callable[[Session], Outcome]:
        FEATURES[name] = Feature(name, run, **options)
        return run

    return add


def fitted(
    name: str,
    behaviour: type = Behaviour,
    module: Mapping[str, Any] = {},
    refused: str | None = None,
    refused_in_first_step: str | None = None,
    **options: Any,
) -> None:
    """A feature that is something a module does, or an option of the Trainer."""

    @feature(
        name, refused_with_eager=refused or refused_in_first_step, before_training=bool(refused)
    )
    def run(session: Session) -> Outcome:
        return session.outcome(*session.fit(session.module(behaviour, **module), **options))


@contextmanager
def quiet() -> Iterator[None]:
    """Without Lightning's notes and advice."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)  # which forgets what the logger has cached of its level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
