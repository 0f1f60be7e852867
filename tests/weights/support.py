"""A small model of repeated blocks, and runs of it with and without streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from offload_strategy.weights.block_residency import BlockResidency
from offload_strategy.weights.guarded_parameter import GuardedParameter
from offload_strategy.weights.streamed_weight import StreamedWeight
from tests.activations.support import noise
from tests.activations.test_recompute import Around
from tests.activations.zoo import batch, loss_of
from tests.training import Numbers, assert_same_history, settings, weights

OVERLAPS = ["eager", "commit", "off"]
#: Those with which gradients may be read after backward.
THAT_KEEP_GRADIENTS = ["commit", "off"]


def overlapping(overlap: str) -> dict[str, Any]:
    """Options of the optimizer; with "in memory" its states are not offloaded."""
    in_memory = overlap == "in memory"
    return {"optimizer": {"enabled": False} if in_memory else {"overlap": overlap}}


def streaming(disk: Path, **sections: Any) -> OffloadEngine:
    return OffloadEngine(
        settings(disk, **{"parameters": {"enabled": True, "min_size": 1}, **sections})
    )


def away(model: Any) -> list[str]:
    """Names of the weights that are not in memory."""
    return [
        name
        for name, parameter in model.named_parameters()
        if type(parameter) is GuardedParameter and not _is_here(parameter)
    ]


def _is_here(parameter: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(parameter.untyped_storage().nbytes() > parameter.element_size())


Use = Callable[[Any, Any], Sequence[Numbers]]
"""What is done with a model and its optimizer; the numbers that come of it."""


class Block(nn.Module):
    """Autograd saves its norm and its gain themselves, and views of what its products take."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.gain * change


class Net(nn.Module):
    """Blocks that repeat, two layers around them, and a parameter of its own."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.scale = nn.Parameter(torch.rand(8))
        self.head = nn.Linear(8, 8)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.features(x) * self.scale)
        return output


class Regions(Net):
    """Each block is a region that is computed again."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self.around = around

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x


def net(of: Callable[[], nn.Module] = Net) -> Any:
    """A model with the same random weights every time."""
    torch.manual_seed(0)
    return of()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def loss(model: Any, number: int = 0) -> torch.Tensor:
    """Of a batch that is the same for the same number, in the model's precision."""
    torch.manual_seed(1000 + number)
    dtype = next(model.parameters()).dtype
    value: torch.Tensor = model(noise(4, 8, seed=number).to(dtype)).pow(2).mean()
    return value


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
        value: torch.Tensor = loss_of(model, batch(kind, number))
        return value

    return forward


def compare(
    disk: Path,
    use: Use,
    make: Callable[[], Any] = net,
    optimizer_of: Callable[[Any], Any] | None = adamw,
    **sections: dict[str, Any],
) -> None:
    """Use a model and its optimizer without and with streamed weights: the same numbers.

    `make` builds the same model every time.
    """

    def run(model: Any, attached: Any) -> list[Numbers]:
        torch.manual_seed(11)
        return list(use(model, attached))

    model = make()
    expected = run(model, optimizer_of(model) if optimizer_of is not None else None)
    expected.append(weights(model))
    model = make()
    with streaming(disk, **sections) as engine:
        attached = None if optimizer_of is None else optimizer_of(model)
        attached = engine.attach(model, attached)
        assert away(model)
        got = run(model, attached)
        assert open_turns(engine) == []
    assert all(type(p) is not GuardedParameter for p in model.parameters())
    got.append(weights(model))
    assert_same_history(got, expected)
    for values in (*got, *expected):
        assert all(
            bool(torch.isfinite(v.double()).all()) for v in values.values() if v.is_floating_point()
        )


def same(
    disk: Path, run: Callable[[Callable[..., Any]], list[Numbers]], **sections: dict[str, Any]
) -> None:
    """Run with a function that attaches, and with one that does not: the same numbers."""
    expected = run(lambda model, optimizer=None: optimizer)
    with streaming(disk, **sections) as engine:
        got = run(engine.attach)
        assert open_turns(engine) == []
    assert_same_history(got, expected)


def compared(
    make: Callable[..., Any] = net,
    optimizer_of: Callable[[Any], Any] | None = adamw,
    overlaps: Sequence[str] = ("commit",),
    **sections: dict[str, Any],
) -> Callable[[Callable[..., Sequence[Numbers]]], Callable[..., None]]:
    """Make a test of a use of a model and its optimizer; see `compare`.

    Arguments of the use after these two, and any arguments of `make`, are parameters of the test;
    so is `overlap` where no overlaps are given.
    """

    def decorate(use: Callable[..., Sequence[Numbers]]) -> Callable[..., None]:
        own = list(signature(use).parameters)[2:]
        made_of = [] if make is net else list(signature(make).parameters)

        def test(disk: Path, overlap: str, **options: Any) -> None:
            compare(
                disk,
                partial(use, **{name: options[name] for name in own}),
                lambda: make(**{name: options[name] for name in made_of}),
                optimizer_of,
                **{**overlapping(overlap), **sections},
            )

        names = dict.fromkeys(["disk", "overlap", *own, *made_of])
        test.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.KEYWORD_ONLY) for name in names]
        )
        return pytest.mark.parametrize("overlap", overlaps)(test) if overlaps else test

    return decorate


def pairs(disk: Path, stack: ExitStack, **sections: Any) -> list[tuple[Any, Any, Any]]:
    """A plain model and a streamed one: engine, model and optimizer of each."""
    plain, streamed = net(), net()
    engine = stack.enter_context(streaming(disk, **sections))
    attached = engine.attach(streamed, adamw(streamed))
    return [(None, plain, adamw(plain)), (engine, streamed, attached)]


def seen_accesses(monkeypatch: pytest.MonkeyPatch) -> list[StreamedWeight]:
    """The weights that are accessed outside their blocks from now on, of engines to come."""
    seen: list[StreamedWeight] = []
    usual = BlockResidency._on_access

    def noted(self: BlockResidency, weight: StreamedWeight) -> None:
        seen.append(weight)
        usual(self, weight)

    monkeypatch.setattr(BlockResidency, "_on_access", noted)
    return seen


def open_turns(engine: OffloadEngine) -> list[str]:
    """Names of the weights that something holds in memory as if their block still computed."""
    assert engine._stream is not None
    return [weight.name for weight in engine._stream._weights.values() if weight.users]


def nearly_all_left(model: nn.Module) -> bool:
    """Whether most of the weights are away."""
    return len(away(model)) > len(list(model.parameters())) // 2
