"""Hooks of the user's own around a model and inside of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from offload_strategy import OffloadEngine
from tests.activations.support import Calls, X, compare, noise, with_gradients
from tests.training import (
    Numbers,
    activations_only,
    assert_same_bits,
    gradients,
    moved,
    on_disk,
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)
    )


def batch(step: int) -> torch.Tensor:
    return noise(6, 8, seed=step)


# ---------------------------------------------------------------------- hooks around ours
class Hooks:
    """Saved-tensor hooks of a user's own, by kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.packed: list[tuple[int, ...]] = []
        self.unpacked = 0

    def _pack(self, tensor: torch.Tensor) -> Any:
        self.packed.append(tuple(tensor.shape))
        if self.kind == "compress":
            return tensor.bfloat16() if tensor.is_floating_point() else tensor
        if self.kind == "compress into a tuple":
            return (tensor.dtype, tensor.to(torch.float64))
        return tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        self.unpacked += 1
        if self.kind == "compress":
            return packed.float() if packed.is_floating_point() else packed
        if self.kind == "compress into a tuple":
            return packed[1].to(packed[0])
        return packed

    def __call__(self) -> AbstractContextManager[Any]:
        if self.kind == "save on the host":
            return save_on_cpu()
        if self.kind == "allow mutation":
            return torch.autograd.graph.allow_mutation_on_saved_tensors()
        return saved_tensors_hooks(self._pack, self._unpack)


#: Whether what they make of a tensor is one, and leaves.
KINDS = {
    "count": True,
    "compress": True,
    "compress into a tuple": False,
    "save on the host": False,
    "allow mutation": False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_around_a_model_do_what_they_do_without_offload(
    engine: OffloadEngine, kind: str
) -> None:
    """Numbers too: where they change what is saved, they change it just the same."""
    model = network()

    def run(between: Callable[[], None]) -> tuple[Numbers, Hooks]:
        hooks = Hooks(kind)
        model.zero_grad()
        torch.manual_seed(3)
        with hooks():
            loss = model(batch(0)).pow(2).sum()
            between()
            loss.backward()
        return gradients(model), hooks

    expected, without = run(lambda: None)
    engine.attach(model)
    for between in (lambda: None, lambda: on_disk(engine)):
        got, hooks = run(between)
        assert_same_bits(got, expected)
        assert hooks.packed == without.packed
        assert hooks.unpacked == without.unpacked
    assert (moved(engine) > 0) == KINDS[kind]


def test_hooks_around_two_engines_are_heard_by_both(disk: Path) -> None:
    """The innermost engine has what is saved inside; neither hides the hooks around them."""
    inner = Calls(lambda w, x: (x @ w).exp())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.weight = nn.Parameter(noise(8, 8))

        def forward(self) -> torch.Tensor:
            return self.inner(X @ self.weight).sin().sum()

    model = Outer()

    def run() -> tuple[Numbers, Hooks]:
        hooks = Hooks("compress")
        model.zero_grad()
        with hooks():
            model().backward()
        return gradients(model), hooks

    expected, without = run()
    with activations_only(disk) as one, activations_only(disk) as two:
        one.attach(model)
        two.attach(inner)
        got, hooks = run()
        on_disk(one)
        on_disk(two)
        assert moved(one) > 0
        assert moved(two) > 0
    assert_same_bits(got, expected)
    assert hooks.packed == without.packed


def test_an_error_in_hooks_around_a_model_ends_its_scope(engine: OffloadEngine) -> None:
    model, expected = with_gradients(lambda w: (X @ w).exp().sum())
    engine.attach(model)

    def refuse(tensor: torch.Tensor) -> Any:
        raise ValueError("not this one")

    with (
        saved_tensors_hooks(refuse, lambda packed: packed),
        pytest.raises(ValueError, match="not this"),
    ):
        model()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model.zero_grad()
    model().backward()
    assert_same_bits(gradients(model), expected)


def test_hooks_inside_a_model_are_called_in_place_of_ours(engine: OffloadEngine) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    def function(w: torch.Tensor) -> torch.Tensor:
        y = (X @ w).exp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = y.sin()
        with save_on_cpu():
            y = y * y
        return y.exp().sum()

    model = Calls(function)
    compare(engine, model, lambda: model())
    assert packed == [64] * 3
