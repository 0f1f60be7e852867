"""What the tests of activations share: tiny models, and a step with and without offload."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload_strategy import OffloadEngine
from tests.training import assert_same_bits, gradients, moved, on_disk


class Calls(nn.Module):
    """A module whose forward is a function of the weight and the input."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(*shape or (8, 8)))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


class Saves(torch.autograd.Function):
    """Saves tensors as they are; its gradient depends on each of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        factor = sum((index + 1) * tensor.sum() for index, tensor in enumerate(saved))
        return grad * factor, *([None] * len(saved))


def network() -> nn.Sequential:
    """A model without dropout: transforms within transforms allow no random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


def with_gradients(
    function: Callable[..., Any], engine: OffloadEngine | None = None
) -> tuple[Calls, dict[str, torch.Tensor]]:
    """A model, and its gradients after a plain backward; then it is attached to an engine."""
    model = Calls(function)
    model().backward()
    expected = gradients(model)
    model.zero_grad()
    if engine is not None:
        engine.attach(model)
    return model, expected


def noise(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


X = noise(8, 8, seed=1)


def compare(engine: OffloadEngine, model: nn.Module, step: Callable[[], Any] | None = None) -> None:
    """Run a step without and with offload: the same gradients, and bytes that left.

    `step` returns the loss, and inputs whose gradients count too; without it `model()` does.
    """

    def run(between: Callable[[], None]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        result = model() if step is None else step()
        result = result if isinstance(result, tuple) else (result,)
        between()
        loss, *others = result
        loss.backward()
        numbers = {"loss": loss.detach().clone(), **gradients(model)}
        for index, tensor in enumerate(others):
            numbers[f"gradient of input {index}"] = tensor.grad.clone()
            tensor.grad = None
        return numbers

    expected = run(lambda: None)
    engine.attach(model)
    for between in (lambda: None, lambda: on_disk(engine)):
        assert_same_bits(run(between), expected)
    assert moved(engine) > 0
    engine.detach_model(model)


def written(engine: OffloadEngine) -> list[int]:
    """Sizes of the writes that are over."""
    return sorted(record.nbytes for record in engine._recorder.moves)
