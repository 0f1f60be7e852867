"""A small model of repeated blocks, its optimizers, and steps that train it."""

from collections.abc import Callable
from operator import call
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.activations.support import noise
from tests.activations.zoo import batch, loss_of
from tests.training import Numbers


class Block(nn.Module):
    """Autograd saves its norm and its gain themselves, and views of what its products take."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks that repeat, called by `around`, two layers beside them, and a parameter alone."""

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        around: Callable[[Any, torch.Tensor], torch.Tensor] = call,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.scale = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 8)
        self.around = around

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x) * self.scale)


def net(of: Callable[[], nn.Module] = Net) -> Any:
    """A model with the same random weights every time."""
    torch.manual_seed(0)
    return of()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Of the parameters that are trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def loss(model: Any, number: int = 0) -> torch.Tensor:
    """Of a batch that is the same for the same number, in the model's precision."""
    torch.manual_seed(1000 + number)
    return model(noise(4, 8, seed=number).to(next(model.parameters()).dtype)).pow(2).mean()


def step(
    model: Any,
    optimizer: Any,
    number: int = 0,
    loss_of: Callable[[Any, int], torch.Tensor] = loss,
    look: Callable[[Any], Numbers] = lambda model: {},
) -> Numbers:
    """A step, or without an optimizer backward alone; the loss, and what `look` saw in between."""
    value = loss_of(model, number)
    value.backward()
    seen = look(model)
    if optimizer is None:
        model.zero_grad()
    else:
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": value.detach().clone(), **seen}


def train(
    model: Any, optimizer: Any, steps: int = 3, first: int = 0, **options: Any
) -> list[Numbers]:
    """Several steps of training; the options are those of `step`."""
    return [step(model, optimizer, number, **options) for number in range(first, first + steps)]


def zoo_loss(kind: str) -> Callable[[Any, int], torch.Tensor]:
    """The forward pass of a model of the zoo, with the same random numbers every time."""

    def forward(model: Any, number: int) -> torch.Tensor:
        torch.manual_seed(number)
        return loss_of(model, batch(kind, number))

    return forward
