"""Streamed weights in the hands of code that was not written for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils

from tests.activations.support import noise
from tests.training import (
    Numbers,
    assert_same_bits,
    gradients,
    in_turn,
    weights,
)
from tests.weights.support import (
    OVERLAPS,
    THAT_KEEP_GRADIENTS,
    adamw,
    compared,
    loss,
    nearly_all_left,
    net,
    seen_accesses,
    step,
    streaming,
    train,
)


# ---------------------------------------------------------------------- parametrizations
class Same(nn.Module):
    """A parametrization that gives the weight itself."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


class Symmetric(nn.Module):
    """Of a square weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        square = weight[: weight.shape[1]]
        return torch.cat([square.triu() + square.triu(1).T, weight[weight.shape[1] :]])


PARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "the weight itself": lambda m: parametrize.register_parametrization(m, "weight", Same()),
    "symmetric": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "weight norm of old": nn.utils.weight_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", amount=0.3),
}


def parametrise(model: Any, way: str) -> Any:
    torch.manual_seed(4)
    for block in model.blocks:
        PARAMETRISED[way](block.up)
    PARAMETRISED[way](model.head)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("way", "overlap"), in_turn(PARAMETRISED, OVERLAPS))
@compared(lambda way: parametrise(net(), way), overlaps=[])
def test_parametrised_weights(model, optimizer):
    return train(model, optimizer)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "way", ["spectral norm", "the weight itself", "weight norm of old", "pruned"]
)
@compared(overlaps=["off"])
def test_weights_that_are_parametrised_when_they_are_streamed(model, optimizer, way):
    history = train(model, optimizer)
    parametrise(model, way)
    return [*history, *train(model, optimizer)]


@compared(lambda: parametrise(net(), "symmetric"))
def test_parametrizations_are_cached_and_removed(model, optimizer):
    with parametrize.cached():
        history = train(model, optimizer, 1)
    for layer in (*(block.up for block in model.blocks), model.head):
        parametrize.remove_parametrizations(layer, "weight")
    return [*history, *train(model, optimizer)]


# ---------------------------------------------------------------------- averages and vectors
AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "exponential, all at once": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
}


@pytest.mark.parametrize(("average", "overlap"), in_turn(AVERAGES, ["commit", "eager"]))
@compared(overlaps=[])
def test_an_average_of_the_weights(model, optimizer, average):
    averaged: Any = swa_utils.AveragedModel(model, **AVERAGES[average])
    history = []
    for number in range(3):
        history.append(step(model, optimizer, number))
        averaged.update_parameters(model)
        with torch.no_grad():
            history.append({"averaged": loss(averaged, number).clone()})
    assert all(type(p) is nn.Parameter for p in averaged.parameters())
    return [*history, weights(averaged)]


@compared(overlaps=["commit", "eager"])
def test_all_weights_as_a_vector(model, optimizer):
    history = []
    for number in range(3):
        history.append(step(model, optimizer, number))
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(model.parameters())
            history.append({"vector": vector.clone()})
            nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
        del vector
    return [*history, *train(model, optimizer)]


@compared()
def test_slices_of_a_vector_that_have_each_their_version(model, optimizer):
    """One storage has all weights then, and each weight counts its changes for itself."""
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            for _ in range(number):
                parameter.mul_(0.99)
    return [*train(model, optimizer), {"vector": vector}]


# ---------------------------------------------------------------------- gradients


@compared(optimizer_of=None)
def test_gradients_as_values_of_a_function(model, optimizer):
    history = []
    for number in range(3):
        slopes = torch.autograd.grad(loss(model, number), list(model.parameters()))
        history.append({str(n): slope.detach().clone() for n, slope in enumerate(slopes)})
        with torch.no_grad():
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter -= 0.1 * slope
    inputs: Any = dict(model.named_parameters())
    if "dict[" not in str(torch.autograd.grad.__annotations__["inputs"]):  # torch before 2.12
        inputs = list(inputs.values())
    slopes = torch.autograd.grad(loss(model), inputs, materialize_grads=True)
    named = slopes.items() if isinstance(slopes, dict) else enumerate(slopes)
    return [*history, {str(name): slope.clone() for name, slope in named}]


@pytest.mark.parametrize("how", ["grad", "inputs of backward"])
def test_asking_for_gradients_brings_no_weights(disk, how, monkeypatch):
    accessed = seen_accesses(monkeypatch)
    with streaming(disk) as engine:
        model = net()
        engine.attach(model)
        value = loss(model)
        accessed.clear()
        if how == "grad":
            torch.autograd.grad(value, list(model.parameters()))
        else:
            value.backward(inputs=list(model.parameters()))
        assert not accessed
        assert nearly_all_left(model)


@compared(optimizer_of=None)
def test_a_backward_hook_sees_weights_whichever_gradients_are_asked_for(model, optimizer):
    seen: list[Numbers] = []

    def look(module: Any, *gradients: Any) -> None:
        seen.append({n: p.detach().norm().clone() for n, p in module.named_parameters()})

    handles = [b.register_full_backward_hook(look) for b in (*model.blocks, model.head)]
    model(noise(4, 8).requires_grad_()).sum().backward()
    assert model.stem.weight.grad is not None
    torch.autograd.grad(model(noise(4, 8).requires_grad_()).sum(), [model.stem.weight])
    for handle in handles:
        handle.remove()
    assert len(seen) == 8
    return seen


def _penalty_on_the_gradient_of_the_input(model: Any, number: int) -> torch.Tensor:
    x = noise(4, 8, seed=number).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    value: torch.Tensor = (slope.norm(dim=1) - 1).pow(2).mean() + model(x.detach()).mean()
    return value


def _penalty_on_the_gradients_of_the_weights(model: Any, number: int) -> torch.Tensor:
    value = loss(model, number)
    slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    return value + torch.stack([slope.pow(2).sum() for slope in slopes]).sum()


PENALTIES = [
    _penalty_on_the_gradient_of_the_input,
    _penalty_on_the_gradients_of_the_weights,
]


@pytest.mark.parametrize(("penalty", "overlap"), in_turn(PENALTIES, THAT_KEEP_GRADIENTS))
@compared(overlaps=[])
def test_penalties(model, optimizer, penalty):
    return train(model, optimizer, loss_of=penalty, look=gradients)


def test_an_own_optimizer_that_is_not_attached_lets_weights_go(disk):
    with streaming(disk) as engine:
        model, plain = net(), net()
        engine.attach(model)
        for each in (model, plain):
            optimizer = adamw(each)
            for number in range(3):
                value = loss(each, number) + 0.1 * sum(p.pow(2).sum() for p in each.parameters())
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                del value
        with torch.no_grad():
            for number in range(2):
                loss(model, number)
        assert nearly_all_left(model), "a penalty of long ago holds them"
        assert_same_bits(weights(model), weights(plain))
