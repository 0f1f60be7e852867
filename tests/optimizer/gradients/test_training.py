"""Plain training with offloaded gradients in the place of all gradients: bit-identical weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adafactor, AdamW, Optimizer, RMSprop

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.pairs import assert_same, source_of
from tests.optimizer.runs import Net, loss_of, make_net
from tests.store.rig import Rig

#: Trains a model, and notes what has to be the same with and without offloaded gradients.
Train = Callable[[Net, list[Any]], None]


def _replace_gradients(model: nn.Module, kind: str, rig: Rig) -> None:
    """From now on each gradient is offloaded as soon as backward has completed it."""

    def offload(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if not grad.requires_grad:
            values = grad.backing.values() if isinstance(grad, OffloadedGradient) else grad
            parameter.grad = OffloadedGradient.of(source_of(kind, values, rig), like=values)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(offload)


def _compare(train: Train, kind: str, rig: Rig) -> None:
    results = []
    for offloads in (False, True):
        model, told = make_net(), []
        if offloads:
            _replace_gradients(model, kind, rig)
        train(model, told)
        results.append((told, dict(model.state_dict())))
    assert_same(results[1], results[0])
    before = make_net().state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in results[0][1].items())


def _backward(model: Net, number: int, **options: Any) -> None:
    loss_of(model, number, extra=True).backward(**options)


def _gradients(model: Net) -> Iterator[torch.Tensor]:
    return (p.grad for p in model.parameters() if p.grad is not None)


def _sgd(model: Net) -> None:
    SGD(model.parameters(), lr=0.1).step()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "SGD foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01, centered=True),
    "Adafactor": lambda p: Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05, 1e9], ids=str)
def test_optimizers_of_pytorch_take_them_as_they_are(
    kind: str, rig: Rig, name: str, clip: float | None
) -> None:
    def train(model: Net, told: list[Any]) -> None:
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            for micro in range(2):
                _backward(model, 10 * step + micro)
            if clip is not None:
                told.append(clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
            told += [g.sum() for g in _gradients(model)]

    _compare(train, kind, rig)
    assert rig.store.live_tickets <= len(list(make_net().parameters()))


# ---------------------------------------------------------------------- between backward and step
def _clip_by_hand(model: Any, told: list[Any]) -> None:
    total = sum(g.pow(2).sum() for g in _gradients(model)) ** 0.5
    told.append(total)
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0.1 / (total + 1e-6)


def _replace(model: Any, told: list[Any]) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone().clamp(-0.01, 0.01)
    model.sometimes.weight.grad = model.sometimes.weight.grad.t().contiguous()


def _drop_some(model: Any, told: list[Any]) -> None:
    model.first.weight.grad = None
    model.conv.bias.grad.zero_()


BETWEEN: dict[str, Callable[[Any, list[Any]], Any]] = {
    **{
        f"clipped by norm {order} foreach={foreach}": lambda m, told, order=order, each=foreach: (
            told.append(clip_grad_norm_(m.parameters(), 0.05, norm_type=order, foreach=each))
        )
        for order in (1.0, 2.0, float("inf"))
        for foreach in (None, True, False)
    },
    "clipped by norm, checked": lambda m, told: clip_grad_norm_(
        m.parameters(), 0.05, error_if_nonfinite=True
    ),
    "clipped twice": lambda m, told: [clip_grad_norm_(m.parameters(), x) for x in (0.1, 0.05)],
    "clipped by groups": lambda m, told: [
        clip_grad_norm_(part.parameters(), 0.01) for part in m.children()
    ],
    "clipped by hand": _clip_by_hand,
    "replaced": _replace,
    "some dropped": _drop_some,
    "compared with autograd.grad": lambda m, told: told.append(
        torch.autograd.grad(loss_of(m, 1), [m.first.weight, m.conv.weight, m.scale])
    ),
    "another backward": lambda m, told: _backward(m, 77),
    "scaled and another backward": lambda m, told: (
        torch._foreach_mul_(list(_gradients(m)), 0.3),
        _backward(m, 77),
    ),
    "model copied": lambda m, told: told.append(dict(copy.deepcopy(m).state_dict())),
    "a gradient in a parameter": lambda m, told: told.append(
        nn.Parameter(m.first.weight.grad).detach().clone()
    ),
    "moved to double and back": lambda m, told: m.double().float(),
    "moved nowhere": lambda m, told: m.to("cpu").float(),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_done_between_backward_and_step(kind: str, rig: Rig, name: str) -> None:
    def train(model: Net, told: list[Any]) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            _backward(model, step)
            BETWEEN[name](model, told)
            optimizer.step()
            optimizer.zero_grad()

    _compare(train, kind, rig)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler_with_overflows(kind: str, rig: Rig, clip: bool, fused: bool) -> None:
    def train(model: Net, told: list[Any]) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        for step in range(6):
            loss = scaler.scale(loss_of(model, step))
            (loss * (torch.inf if step in (1, 4) else 1.0)).backward()
            if clip:
                scaler.unscale_(optimizer)
                told.append(clip_grad_norm_(model.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            told.append(scaler.get_scale())
            optimizer.zero_grad()

    _compare(train, kind, rig)


# ---------------------------------------------------------------------- unusual uses
def _swapped_on_conversion(model: Net, told: list[Any]) -> None:
    _backward(model, 0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    told += [p.grad for p in model.parameters()]


def _non_finite_norm(model: Net, told: list[Any]) -> None:
    (loss_of(model, 0) * torch.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    model.zero_grad()
    _backward(model, 0)


def _graph_over_gradients(model: Net, told: list[Any]) -> None:
    _backward(model, 0)
    # Accumulates out of place, and what comes out has a history.
    _backward(model, 1, create_graph=True)
    penalty = sum(g.pow(2).sum() for g in _gradients(model))
    told.append(penalty.detach())
    model.zero_grad()
    penalty.backward()


def _loss_of_gradients(model: Any, told: list[Any]) -> None:
    _backward(model, 0)
    weight = torch.full((), 0.5, requires_grad=True)
    (weight * model.first.weight.grad).pow(2).sum().backward()
    told.append(weight.grad)


def _saved_by_a_graph(model: Any, told: list[Any]) -> None:
    _backward(model, 0)
    weight = torch.full((), 0.5, requires_grad=True)
    loss = (weight * model.first.weight.grad).sum()
    model.first.weight.grad.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "use",
    [
        _swapped_on_conversion,
        _non_finite_norm,
        _graph_over_gradients,
        _loss_of_gradients,
        _saved_by_a_graph,
    ],
)
def test_unusual_uses_of_gradients(use: Train, kind: str, rig: Rig) -> None:
    def train(model: Net, told: list[Any]) -> None:
        use(model, told)
        _sgd(model)

    _compare(train, kind, rig)


def test_norms_cached_in_advance_load_no_gradient_until_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden() -> Any:
        raise AssertionError("a gradient was loaded")

    def train(model: Net, told: list[Any]) -> None:
        optimizer = AdamW(model.parameters(), lr=1e-2)
        requested: dict[int, Any] = {}
        for step in range(3):
            _backward(model, step)
            offloaded = [g for g in _gradients(model) if isinstance(g, OffloadedGradient)]
            for index, g in enumerate(offloaded):
                for order in requested.get(index, ()):
                    g.backing.cache_norm(order, norm_of(g.backing.values(), order))
                if step:
                    patch.setattr(g.backing, "_load", forbidden)
            told.append(clip_grad_norm_(model.parameters(), 0.01))
            patch.undo()
            requested = {i: g.backing.requested_norms for i, g in enumerate(offloaded)}
            assert all(requested.values())
            optimizer.step()
            optimizer.zero_grad()

    with monkeypatch.context() as patch:
        _compare(train, "stored", rig)


def test_the_same_edits_have_equal_histories_step_after_step(rig: Rig) -> None:
    model = make_net()
    _replace_gradients(model, "held", rig)
    histories = []
    for limit in (1e9, 1e9, 1e-3, 1e-3):
        _backward(model, 0)
        clip_grad_norm_(model.parameters(), limit)
        histories.append({g.backing.history for g in _gradients(model)})  # type: ignore[attr-defined]
        model.zero_grad()
    # A limit that was not reached is no edit; and all gradients were scaled alike.
    assert histories[0] == histories[1]
    assert not any(histories[0])
    assert histories[2] == histories[3]
    assert all(histories[2])
    assert {len(each) for each in histories} == {1}
