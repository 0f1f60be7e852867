"""A gradient that an update has used up: its metadata remain, what needs its values fails."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.gradients.gradient_backing import ConsumedGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.acts import unscaled

WHAT = "parameter 'head.weight' (3 x 5)"


def consumed(shape: tuple[int, ...] = (3, 5)) -> OffloadedGradient:
    return OffloadedGradient.of(ConsumedGradient(WHAT), like=torch.empty(shape))


def parameter_of(offloaded: OffloadedGradient) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(offloaded.shape))
    parameter.grad = offloaded
    return parameter


REFUSED: dict[str, Callable[[Any], Any]] = {
    "norm of data": lambda g: g.data.norm(),
    "listed norm": lambda g: torch._foreach_norm([g]),
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(-1),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.dumps(g),
    "scaled by one": lambda g: g.mul_(1.0),
    "clamped": lambda g: g.clamp_(-1, 1),
    "added": lambda g: g.add_(torch.ones(3, 5)),
    "unscaled": lambda g: unscaled(g, 1.0),
    "raw": lambda g: g.backing.raw(),
    "clipped by norm": lambda g: nn.utils.clip_grad_norm_(parameter_of(g), 1.0),
    "clipped by value": lambda g: nn.utils.clip_grad_value_(parameter_of(g), 1.0),
    "updated with": lambda g: torch.optim.SGD([parameter_of(g)], lr=0.1).step(),
    "of a model that is converted": lambda g: _model(g).double(),
    "of another backward": lambda g: (parameter_of(g) ** 2).sum().backward(create_graph=True),
}


def _model(g: torch.Tensor) -> nn.Module:
    model = nn.Module()
    model.weight = parameter_of(g)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_whatever_needs_the_values_names_parameter_reason_and_remedy(
    act: Callable[[Any], Any],
) -> None:
    offloaded = consumed()
    with pytest.raises(OffloadError) as refused:
        act(offloaded)
    for part in (WHAT, "overlap: eager", "overlap: commit", "step()"):
        assert part in str(refused.value)
    assert not offloaded.backing.edited
    assert not offloaded.backing.history.edits


def test_its_metadata_are_those_of_the_gradient() -> None:
    g = consumed()
    assert (g.shape, g.dtype, g.stride(), g.grad_fn) == ((3, 5), torch.float32, (5, 1), None)
    assert "consumed" in repr(g)
    assert "consumed" in f"{g}"
    assert g.data.shape == g.detach().shape == (3, 5)
    assert torch.equal(torch.zeros_like(g), torch.zeros(3, 5))
    g.detach_()
    g.requires_grad_(False)
    assert g.to("cpu") is g


ZEROED: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": lambda p: p.grad.zero_(),
    "listed": lambda p: torch._foreach_zero_([p.grad]),
    "by the optimizer, foreach": lambda p: torch.optim.SGD([p], lr=0.1, foreach=True).zero_grad(
        set_to_none=False
    ),
    "by the model": lambda p: nn.ParameterList([p]).zero_grad(set_to_none=False),
    "filled": lambda p: p.grad.fill_(0.0),
    "copied into": lambda p: p.grad.copy_(torch.zeros(3, 5)),
    "replaced": lambda p: setattr(p.grad, "data", torch.zeros(3, 5)),
}


@pytest.mark.parametrize("zeroed", ZEROED.values(), ids=ZEROED)
def test_zeroed_it_is_a_gradient_again(zeroed: Callable[[nn.Parameter], Any]) -> None:
    parameter = parameter_of(consumed())
    kept = parameter.grad
    zeroed(parameter)
    assert parameter.grad is kept
    assert torch.equal(parameter.grad, torch.zeros(3, 5))
    assert "consumed" not in repr(parameter.grad)
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3, 5), 2.0))
