"""Training with and without offload, side by side."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.idle_memory import IdleLimit
from tests.optimizer.custom_optimizers import Twisted, twisted
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
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
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


class WideNet(nn.Module):
    """Large weights, which may be sliced or quantized, and small ones; some are frozen."""

    def __init__(self, width: int = 256, hidden: int = 256, vocabulary: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(width, hidden)
        self.frozen = nn.Linear(hidden, width).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor, extra: bool = False) -> torch.Tensor:
        return self.out(self.norm(self.frozen(F.gelu(self.first(self.embedding(tokens))))))


def make_layers(count: int, width: int) -> nn.Sequential:
    """A chain of equal layers; each makes a subgroup of ``width**2`` elements."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(100 + number))


def loss_of(model: nn.Module, number: int, extra: bool = False) -> torch.Tensor:
    tokens = batch(number)
    return F.cross_entropy(model(tokens, extra).flatten(0, 1), tokens.roll(-1, 1).flatten())


def snapshot(model: nn.Module, *optimizers: Optimizer, gradients: bool = True) -> Numbers:
    """Copies of all parameters, plain states and, unless told otherwise, gradients."""
    numbers: Numbers = {}
    for name, parameter in model.named_parameters():
        numbers[name] = parameter.detach().clone()
        if gradients and parameter.grad is not None:
            numbers[f"{name}.grad"] = parameter.grad.clone()
        for index, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
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
    make_model: Callable[[], Any] = make_net
    history: list[Numbers] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.make_model()
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


def steps(
    run: Run,
    count: int,
    start: int = 0,
    between: Callable[[int], object] = lambda number: None,
    extra: bool = False,
) -> None:
    """Train; `between` gets the number of each step between its backward and `step()`."""
    for number in range(start, start + count):
        run.optimizer.zero_grad()
        run.backward(number, extra)
        between(number)
        run.step()


def _groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [
        {"params": matrices[:3], "lr": 3e-2, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": matrices[3:]},
    ]


def _of(kind: Any, *settings: Any, in_groups: bool = False, **options: Any) -> MakeOptimizer:
    return lambda m: kind(_groups(m) if in_groups else m.parameters(), *settings, **options)


def _decay_gradients(o: Any, g: Any, p: Any, s: Any) -> None:
    """Add weight decay to the gradients themselves, as older optimizers do."""
    p.grad.add_(p, alpha=0.1)


#: `tests/conformance` has every option of every optimizer of torch.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam amsgrad fused": _of(optim.Adam, 1e-2, amsgrad=True, fused=True),
    "AdamW": _of(optim.AdamW, 1e-2),
    "AdamW foreach": _of(optim.AdamW, 1e-2, foreach=True),
    "AdamW fused": _of(optim.AdamW, 1e-2, fused=True),
    "AdamW per tensor": _of(optim.AdamW, 1e-2, foreach=False),
    "AdamW tensor lr fused": _of(optim.AdamW, torch.tensor(1e-2), fused=True),
    "AdamW groups": _of(optim.AdamW, 1e-2, in_groups=True),
    "SGD": _of(optim.SGD, 0.1),
    "SGD momentum": _of(optim.SGD, 0.1, momentum=0.9),
    "SGD groups, maximize": _of(optim.SGD, 0.1, in_groups=True, momentum=0.5, maximize=True),
    "NAdam": _of(optim.NAdam, 1e-2, weight_decay=0.1),
    "Adamax foreach groups": _of(optim.Adamax, 1e-2, in_groups=True, foreach=True),
    "Adagrad": _of(optim.Adagrad, 1e-2, initial_accumulator_value=0.1),
    "RMSprop centered foreach": _of(optim.RMSprop, 1e-3, centered=True, momentum=0.9, foreach=True),
    "Rprop": _of(optim.Rprop, 1e-2),
    "ASGD": _of(optim.ASGD, 1e-2, t0=2),
    "Adafactor": _of(optim.Adafactor, 1e-2),
    "Muon": lambda m: optim.Muon([p for p in m.parameters() if p.dim() == 2], 1e-2),
    "of somebody else's": _of(Twisted),
    "that changes gradients": _of(twisted(_decay_gradients)),
}
adamw = OPTIMIZERS["AdamW fused"]


@contextmanager
def offloading(
    directory: Path, overlap: str = "commit", host: str | None = None, **sections: Any
) -> Iterator[OffloadEngine]:
    """An engine that offloads optimizer states, in subgroups of a few tensors."""
    given = {"overlap": overlap, "subgroup_size": 60, **sections.pop("optimizer", {})}
    config = settings(directory, host, optimizer=given, activations={"enabled": False}, **sections)
    with OffloadEngine(config) as engine:
        yield engine


def give_room_for_new_weights(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """Have new weights wait for `step()` in memory, or else on the tiers."""
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: has_room)


def compare(
    script: Callable[[Run], None],
    make_optimizer: MakeOptimizer | None,
    directory: Path,
    overlap: str = "commit",
    host: str | None = None,
    make_model: Callable[[], Any] = make_net,
    **options: Any,
) -> dict[str, float]:
    """Fail unless a script notes the very same without and with offload; the engine's metrics."""
    eager = overlap == "eager"
    plain = Run(make_optimizer, None, eager, make_model)
    script(plain)
    with offloading(directory, overlap, host, optimizer=options) as engine:
        offloaded = Run(make_optimizer, engine, eager, make_model)
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
