"""A small model of repeated blocks, and runs of it with and without streamed weights."""

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature, signature
from operator import call
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.support import noise
from tests.activations.zoo import batch, loss_of
from tests.training import Numbers, assert_same_history, settings, weights

OVERLAPS = ["eager", "commit", "off"]


def streaming(disk: Path, **sections: Any) -> OffloadEngine:
    sections = {"parameters": {"enabled": True, "min_size": 1}, **sections}
    return OffloadEngine(settings(disk, **sections))


def away(model: Any) -> list[str]:
    """Names of the weights that are not in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return [
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is GuardedParameter
            and parameter.untyped_storage().nbytes() <= parameter.element_size()
        ]


def nearly_all_left(model: nn.Module) -> bool:
    return len(away(model)) > len(list(model.parameters())) // 2


def open_turns(engine: OffloadEngine) -> list[str]:
    """Names of the weights that something holds in memory as if their block still computed."""
    assert engine._stream is not None
    return [weight.name for weight in engine._stream._weights.values() if weight.users]


def all_plain(model: nn.Module) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in model.parameters())


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
    """One step of training with a batch; without an optimizer the gradients are dropped.

    Returns the loss, and what `look` returned between backward and `step()`.
    """
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


def the_same(run: Callable[..., Any], names: Iterable[str] | None = None) -> Callable[..., None]:
    """Make a test of a run: the same numbers and weights without and with streamed weights.

    The run returns what it saw, and models. It is called with an engine, or None, and its other
    arguments, or those of these names, are parameters of the test and may be fixtures.
    """
    names = list(signature(run).parameters)[1:] if names is None else names

    def test(disk: Path, sections: dict[str, Any], **options: Any) -> None:
        history, *models = run(None, **options)
        expected = [*history, *map(weights, models)]
        with streaming(disk, **sections) as engine:
            history, *models = run(engine, **options)
            assert open_turns(engine) == []
        assert not any(type(p) is GuardedParameter for m in models for p in m.parameters())
        assert_same_history([*history, *map(weights, models)], expected)
        for value in (value for values in expected for value in values.values()):
            assert not value.is_floating_point() or bool(value.double().isfinite().all())

    test.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY)
            for name in dict.fromkeys(["disk", "sections", *names])
        ]
    )
    return test


def compared(
    make: Callable[..., Any] = net, optimizer_of: Callable[[Any], Any] | None = adamw
) -> Callable[[Callable[..., Iterable[Numbers]]], Callable[..., None]]:
    """Make a test of a use of a model and its optimizer, as `the_same` does.

    `make` builds the same model every time. Its required arguments, and those of the use after the
    model and the optimizer, are parameters of the test. One that is named `engine` is the engine.
    """
    made_of = [name for name, p in signature(make).parameters.items() if p.default is p.empty]

    def decorate(use: Callable[..., Iterable[Numbers]]) -> Callable[..., None]:
        own = list(signature(use).parameters)[2:]

        def run(engine: OffloadEngine | None, **options: Any) -> tuple[Any, Any]:
            model = make(**{name: options[name] for name in made_of})
            optimizer = None if optimizer_of is None else optimizer_of(model)
            if engine is not None:
                optimizer = engine.attach(model, optimizer)
                assert away(model)
            torch.manual_seed(11)
            options["engine"] = engine
            return use(model, optimizer, **{name: options[name] for name in own}), model

        return the_same(run, [name for name in (*own, *made_of) if name != "engine"])

    return decorate
