"""Transforms of torch.func around a model and inside of it, and anomaly mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload_strategy import OffloadEngine
from tests.activations.support import Calls, X, compare, noise
from tests.training import bits


def network() -> nn.Module:
    torch.manual_seed(0)
    # No dropout: transforms within transforms allow no random numbers.
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))


def batch(step: int) -> torch.Tensor:
    return noise(6, 8, seed=step)


def _per_sample(model: nn.Module) -> list[torch.Tensor]:
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).pow(2).sum()

    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    return list(slopes(parameters, batch(0)).values())


AROUND: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "vmap": lambda m: list(
        torch.autograd.grad(
            torch.func.vmap(m)(batch(0)[:, None]).pow(2).sum(),
            list(m.parameters()),
        )
    ),
    "gradients per sample": _per_sample,
    "Jacobians": lambda m: [torch.func.jacrev(m)(batch(0)[0])],
    "vector-Jacobian products": lambda m: [
        torch.func.vjp(m, batch(0))[1](torch.ones(6, 8))[0]
    ],
    "Jacobian-vector products": lambda m: [
        *torch.func.jvp(m, (batch(0),), (batch(1),))
    ],
    "Hessians": lambda m: [torch.func.hessian(lambda x: m(x).pow(2).sum())(batch(0)[0])],
    "other parameters": lambda m: list(
        torch.autograd.grad(
            torch.func.functional_call(
                m, {k: (v * 2) for k, v in m.named_parameters()}, (batch(0),)
            ).pow(2).sum(),
            list(m.parameters()),
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("transform", AROUND)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own use of it
def test_a_model_may_be_called_by(transform: str, engine: OffloadEngine) -> None:
    model = network()

    def run() -> list[Any]:
        torch.manual_seed(3)
        return [bits(tensor) for tensor in AROUND[transform](model)]

    expected = run()
    engine.attach(model)
    assert run() == expected
    assert run() == expected


def test_an_error_inside_a_transform_leaves_the_scope_as_it_was(engine: OffloadEngine) -> None:
    def fail(v: torch.Tensor) -> torch.Tensor:
        raise ValueError("inside")

    def function(w: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match="inside"):
            torch.func.grad(fail)(w)
        return (X @ w).exp().sin().sum()

    model = Calls(function)
    compare(engine, model, lambda: model())


def test_hooks_of_the_users_own_are_refused_by_transforms_as_without_offload(
    engine: OffloadEngine,
) -> None:
    model = Calls(lambda w: torch.func.grad(lambda v: (v * w).sum())(w * 1).sum())

    def run() -> None:
        mine = saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)
        with mine, pytest.raises(RuntimeError, match="saved tensor hooks"):
            model()

    run()
    engine.attach(model)
    run()
    model()  # without them


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_anomaly_mode_names_the_operation_and_changes_nothing_else(engine: OffloadEngine) -> None:
    model = Calls(lambda w: (X @ w).exp().sum())
    with torch.autograd.detect_anomaly():
        compare(engine, model, lambda: model())
    model = Calls(lambda w: ((w - w) * 1).sqrt().mul(0).sum())
    engine.attach(model)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match=r"SqrtBackward0.* returned nan"),
        pytest.warns(UserWarning, match="in SqrtBackward0"),
    ):
        model().backward()
