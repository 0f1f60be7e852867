"""Short training runs through Accelerate, with everything that a comparison needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from offload_strategy.integrations.accelerate.plugin import SSDOffloadPlugin, session_of
from tests.integrations.lightning_runs import assert_same, batches, parameters_of, tiny_model


def forget_accelerator() -> None:
    """Accelerate keeps its state in classes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@dataclass
class Run:
    """A run, and the objects to go on with it."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    loader: Any
    scheduler: Any
    losses: list[float] = field(default_factory=list)
    validation_losses: tuple[float, ...] = ()

    @property
    def parameters(self) -> list[torch.Tensor]:
        return parameters_of(self.model)

    @property
    def engine(self) -> Any:
        session = session_of(self.accelerator)
        return None if session is None else session.engine

    def train(self, steps: int, clip: float | None = None) -> Run:
        """Train for a number of optimizer steps."""
        done = 0
        while done < steps:
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.mse_loss(self.model(x), y)
                    self.accelerator.backward(loss)
                    if clip is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                done += self.accelerator.sync_gradients
                if done == steps:
                    break
        return self


def prepare(
    plugin: SSDOffloadPlugin | None = None,
    accelerator: Accelerator | None = None,
    make_model: Callable[[], nn.Module] = tiny_model,
    **options: Any,
) -> Run:
    if accelerator is None:
        handlers = [] if plugin is None else [plugin]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **options)
    torch.manual_seed(0)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=50)
    return Run(accelerator, *accelerator.prepare(model, inner, batches(), schedule))


def with_and_without(train: Callable[[SSDOffloadPlugin | None], Run], config: Any = None) -> Run:
    """Check that training is the same with the plugin and without, and return the former."""
    plain, offloaded = train(None), train(SSDOffloadPlugin(config))
    assert_same(offloaded, plain)
    return offloaded
