"""Training with and without offload, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_strategy import OffloadEngine
from offload_strategy.optimizer import offloaded_optimizer as offloaded
from offload_strategy.optimizer.overlap import overlap_modes
from offload_strategy.optimizer.overlap.overlap_modes import RetainedGradients
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from tests.training import Numbers, assert_same_history, bits, settings

MakeOptimizer = Callable[[nn.Module], Optimizer]

OVERLAPS = ["commit", "off"]
EVERY_OVERLAP = ["commit", "eager", "off"]


class Net(nn.Module):
    """A bit of everything that a parameter can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.tied = nn.Linear(8, 6, bias=False)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.skewed = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, tokens: torch.Tensor, extra: bool = False) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        if extra:
            x = x + self.sometimes(x)
        picture = torch.sin(torch.arange(75.0)).reshape(1, 3, 5, 5)
        x = x + self.conv(picture).mean((0, 2, 3)) @ self.skewed
        x = self.tied(F.gelu(self.norm(self.first(x))))
        return self.out(x) * self.scale


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 11, (4, 5), generator=generator)


def loss_of(model: nn.Module, number: int, extra: bool = False) -> torch.Tensor:
    tokens = batch(number)
    logits = model(tokens, extra)
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def snapshot(model: nn.Module, *optimizers: Optimizer, gradients: bool = True) -> Numbers:
    """Copies of all parameters, states and, unless told otherwise, gradients."""
    numbers: Numbers = {}
    for name, parameter in model.named_parameters():
        numbers[name] = parameter.detach().clone()
        if gradients and parameter.grad is not None:
            numbers[f"{name}.grad"] = parameter.grad.clone()
        for index, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    numbers[f"{name}.state{index}.{key}"] = value.clone()
    return numbers


@dataclass
class Run:
    """One training run; the same script is run without an engine and with one.

    With `eager`, gradients are not compared, nor is anything between backward and `step()`.
    """

    make_optimizer: MakeOptimizer | None = None
    engine: OffloadEngine | None = None
    eager: bool = False
    history: list[Numbers] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_net()
        if self.make_optimizer is not None:
            self.optimizer = self.wrap(self.make_optimizer(self.model))

    def wrap(self, optimizer: Optimizer, model: nn.Module | None = None) -> Optimizer:
        """The optimizer to use."""
        return optimizer if self.engine is None else self.engine.attach(model, optimizer)

    def hint(self, index: int, last: bool) -> None:
        if self.engine is not None:
            self.engine.microbatch(index, last=last)

    def note(self, loss: torch.Tensor | None = None, *optimizers: Optimizer) -> None:
        """Remember everything that is to be compared at this moment."""
        numbers = snapshot(self.model, *(optimizers or (self.optimizer,)), gradients=not self.eager)
        if loss is not None:
            numbers["loss"] = loss.detach().clone()
        self.history.append(numbers)

    def backward(self, number: int, extra: bool = False) -> torch.Tensor:
        loss = loss_of(self.model, number, extra)
        loss.backward()
        return loss

    def step(self) -> None:
        """Step; what is visible just before and after it is compared."""
        if not self.eager:
            self.note()
        self.optimizer.step()
        self.note()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-2, fused=True)


def steps(run: Run, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        run.optimizer.zero_grad()
        run.backward(number)
        run.step()


Script = Callable[[Run], None]


@contextmanager
def offloading(
    directory: Path, overlap: str = "commit", host: str | None = None, **sections: Any
) -> Iterator[OffloadEngine]:
    """An engine that offloads optimizer states, in subgroups of a few tensors."""
    options = {"overlap": overlap, "subgroup_size": 60, **sections.pop("optimizer", {})}
    config = settings(
        directory, host, optimizer=options, activations={"enabled": False}, **sections
    )
    with OffloadEngine(config) as engine:
        yield engine


def let_gradients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every gradient of the engines to come wait for `step()` in the tiers, if any may."""
    monkeypatch.setattr(overlap_modes, "_SMALLEST_BYTES", 1)

    def without_memory(store: TensorStore, tiers: Sequence[Tier], _: int) -> RetainedGradients:
        return RetainedGradients(store, tiers, 0)

    monkeypatch.setattr(offloaded, "RetainedGradients", without_memory)


def compare(
    script: Script,
    make_optimizer: MakeOptimizer | None,
    directory: Path,
    overlap: str = "commit",
    host: str | None = None,
    **options: Any,
) -> dict[str, float]:
    """Run a script without and with offload; everything noted must be the same to the last bit.

    Returns:
        the engine's metrics.
    """
    eager = overlap == "eager"
    plain = Run(make_optimizer, eager=eager)
    script(plain)
    with offloading(directory, overlap, host, optimizer=options) as engine:
        offloaded = Run(make_optimizer, engine, eager)
        script(offloaded)
        metrics = engine.metrics()
    assert_same_history(offloaded.history, plain.history)
    assert len(plain.history) > 0
    return metrics


def assert_same_state_dict(
    got: Any, expected: Any, where: str = "state_dict", *, in_order: bool = True
) -> None:
    """The same keys, in the same order unless told otherwise, values, types and bits."""

    def same(one: Any, other: Any, place: str) -> None:
        assert_same_state_dict(one, other, f"{where}{place}", in_order=in_order)

    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert (list if in_order else set)(got) == (list if in_order else set)(expected), where
        for key, value in expected.items():
            same(got[key], value, f"[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, value in enumerate(expected):
            same(got[index], value, f"[{index}]")
    elif is_traceable_wrapper_subclass(expected):
        names, context = expected.__tensor_flatten__()
        assert got.__tensor_flatten__() == (names, context), where
        for name in names:
            same(getattr(got, name), getattr(expected, name), f".{name}")
    elif isinstance(expected, torch.Tensor):
        assert bits(got) == bits(expected), where
        assert got.device == expected.device, where
        assert got.stride() == expected.stride(), where
        assert got.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), where
    else:
        assert got == expected, where
