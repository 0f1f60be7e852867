"""Plain training with offloaded gradients in the place of all gradients: bit-identical weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.pairs import assert_same, source_of
from tests.store.rig import Rig


class Net(nn.Module):
    """Layers of several shapes, one of them used twice, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.unused = nn.Linear(2, 2)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.conv(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = self.norm(self.inner(torch.relu(self.inner(hidden))))
        logits = hidden @ self.embedding.weight.t() * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(5)
    return Net().to(dtype)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(seed))


def replace_gradients(model: nn.Module, kind: str, rig: Rig) -> None:
    """From now on each gradient leaves as soon as backward has completed it."""

    def leave(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.requires_grad:
            return
        values = grad.backing.values() if isinstance(grad, OffloadedGradient) else grad
        parameter.grad = OffloadedGradient.of(source_of(kind, values, rig), like=values)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(leave)


class Run:
    """One training; what `train` does is done with and without offloaded gradients."""

    def __init__(self, kind: str | None, rig: Rig, dtype: torch.dtype = torch.float32) -> None:
        self.model = net(dtype)
        self.kind = kind
        self.told: list[Any] = []
        if kind is not None:
            replace_gradients(self.model, kind, rig)

    def gradients(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                if self.kind is not None and not parameter.grad.requires_grad:
                    assert type(parameter.grad) is OffloadedGradient
                yield parameter.grad


def compare(
    train: Callable[[Run], Any], kind: str, rig: Rig, dtype: torch.dtype = torch.float32
) -> None:
    runs = [Run(None, rig, dtype), Run(kind, rig, dtype)]
    results = [train(run) for run in runs]
    assert_same(results[1], results[0])
    assert_same(runs[1].told, runs[0].told)
    states = [dict(run.model.state_dict()) for run in runs]
    assert_same(states[1], states[0])
    before = net(dtype).state_dict()
    assert any(not torch.equal(states[0][name], before[name]) for name in before)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def parameters_with_gradients(run: Run) -> list[nn.Parameter]:
    return [p for name, p in run.model.named_parameters() if "unused" not in name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05, 1e9], ids=str)
def test_optimizers_of_pytorch_take_them_as_they_are(
    kind: str,
    rig: Rig,
    make: Callable[[Any], torch.optim.Optimizer],
    dtype: torch.dtype,
    clip: float | None,
) -> None:
    def train(run: Run) -> None:
        optimizer = make(run.model.parameters())
        for step in range(3):
            for micro in range(2):
                loss = run.model(batch(10 * step + micro))
                loss.backward()
                run.told.append(loss.detach())
            list(run.gradients())
            if clip is not None:
                run.told.append(nn.utils.clip_grad_norm_(run.model.parameters(), clip))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
            run.told += [g.sum() for g in run.gradients()]

    compare(train, kind, rig, dtype)
    assert rig.store.live_tickets <= len(list(net().parameters()))


# ---------------------------------------------------------------------- between backward and step
def _by_hand(run: Run) -> None:
    total = sum(p.grad.pow(2).sum() for p in run.model.parameters() if p.grad is not None) ** 0.5
    run.told.append(total)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad *= 0.1 / (total + 1e-6)


def _replaced(run: Run) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone().clamp(-0.01, 0.01)


def _some_dropped(run: Run) -> None:
    run.model.inner.weight.grad = None
    run.model.conv.bias.grad.zero_()


def _swapped(run: Run) -> None:
    first = run.model.inner.weight.grad
    run.model.inner.weight.grad = first.t().contiguous()


BETWEEN: dict[str, Callable[[Run], Any]] = {
    **{
        f"clipped by norm {order} foreach={foreach}": lambda run, order=order, foreach=foreach: (
            run.told.append(
                nn.utils.clip_grad_norm_(
                    run.model.parameters(), 0.05, norm_type=order, foreach=foreach
                )
            )
        )
        for order in (1.0, 2.0, float("inf"))
        for foreach in (None, True, False)
    },
    "clipped by norm, checked": lambda run: nn.utils.clip_grad_norm_(
        run.model.parameters(), 0.05, error_if_nonfinite=True
    ),
    "clipped twice": lambda run: [
        nn.utils.clip_grad_norm_(run.model.parameters(), limit) for limit in (0.1, 0.05)
    ],
    "clipped by groups": lambda run: [
        nn.utils.clip_grad_norm_(part.parameters(), 0.01) for part in run.model.children()
    ],
    "clipped by hand": _by_hand,
    "replaced": _replaced,
    "some dropped": _some_dropped,
    "swapped": _swapped,
    "compared with autograd.grad": lambda run: run.told.append(
        torch.autograd.grad(run.model(batch(1)), parameters_with_gradients(run))
    ),
    "another backward": lambda run: run.model(batch(77)).backward(),
    "scaled and another backward": lambda run: (
        torch._foreach_mul_(list(run.gradients()), 0.3),
        run.model(batch(77)).backward(),
    ),
    "model copied": lambda run: run.told.append(dict(copy.deepcopy(run.model).state_dict())),
    "a gradient in a parameter": lambda run: run.told.append(
        nn.Parameter(run.model.inner.weight.grad).detach().clone()
    ),
    "moved to double and back": lambda run: run.model.double().float(),
    "moved nowhere": lambda run: run.model.to("cpu").float(),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_is_done_between_backward_and_step(
    kind: str, rig: Rig, between: Callable[[Run], Any]
) -> None:
    def train(run: Run) -> None:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
        for step in range(3):
            run.model(batch(step)).backward()
            between(run)
            optimizer.step()
            optimizer.zero_grad()

    compare(train, kind, rig)


def test_models_whose_tensors_are_swapped_when_they_are_converted(kind: str, rig: Rig) -> None:
    def train(run: Run) -> None:
        run.model(batch(0)).backward()
        run.model.double()
        run.told += [p.grad for p in run.model.parameters()]
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        compare(train, kind, rig)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_grad_scaler_with_overflows(kind: str, rig: Rig, clip: bool, fused: bool) -> None:
    def train(run: Run) -> None:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        for step in range(6):
            loss = scaler.scale(run.model(batch(step)))
            (loss * (torch.inf if step in (1, 4) else 1.0)).backward()
            if clip:
                scaler.unscale_(optimizer)
                run.told.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            run.told.append(scaler.get_scale())
            optimizer.zero_grad()

    compare(train, kind, rig)


def test_non_finite_norms_are_refused(kind: str, rig: Rig) -> None:
    def train(run: Run) -> None:
        (run.model(batch(0)) * torch.inf).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(run.model.parameters(), 1.0, error_if_nonfinite=True)
        run.model.zero_grad()
        run.model(batch(0)).backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    compare(train, kind, rig)


def test_a_graph_over_gradients(kind: str, rig: Rig) -> None:
    def train(run: Run) -> None:
        run.model(batch(0)).backward()
        # Accumulates out of place, and what comes out has a history.
        run.model(batch(1)).backward(create_graph=True)
        penalty = sum(g.pow(2).sum() for g in run.gradients())
        run.told.append(penalty.detach())
        run.model.zero_grad()
        penalty.backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    compare(train, kind, rig)


def test_losses_of_gradients(kind: str, rig: Rig) -> None:
    def train(run: Run) -> None:
        run.model(batch(0)).backward()
        weight = torch.full((), 0.5, requires_grad=True)
        loss = (weight * run.model.inner.weight.grad).pow(2).sum()
        loss.backward()
        run.told.append(weight.grad)
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    compare(train, kind, rig)


def test_a_gradient_that_a_graph_has_saved_is_watched(kind: str, rig: Rig) -> None:
    def train(run: Run) -> None:
        run.model(batch(0)).backward()
        weight = torch.full((), 0.5, requires_grad=True)
        loss = (weight * run.model.inner.weight.grad).sum()
        run.model.inner.weight.grad.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        torch.optim.SGD(run.model.parameters(), lr=0.1).step()

    compare(train, kind, rig)


def test_norms_cached_in_advance_load_no_gradient_until_step(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run) -> None:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
        asked: dict[int, Any] = {}
        for step in range(3):
            run.model(batch(step)).backward()
            offloaded = [g for g in run.gradients() if isinstance(g, OffloadedGradient)]
            for index, g in enumerate(offloaded):
                for order in asked.get(index, ()):
                    g.backing.cache_norm(order, norm_of(g.backing.values(), order))
                if step:
                    patch.setattr(g.backing, "_load", forbidden)
            run.told.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.01))
            patch.undo()
            asked = {index: g.backing.requested_norms for index, g in enumerate(offloaded)}
            assert all(asked.values())
            optimizer.step()
            optimizer.zero_grad()

    def forbidden() -> Any:
        raise AssertionError("a gradient was loaded")

    with monkeypatch.context() as patch:
        compare(train, "stored", rig)


def test_the_same_edits_have_equal_histories_step_after_step(rig: Rig) -> None:
    run = Run("held", rig)
    recipes = []
    for limit in (1e9, 1e9, 1e-3, 1e-3):
        run.model(batch(0)).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), limit)
        recipes.append(
            {g.backing.history for g in run.gradients() if isinstance(g, OffloadedGradient)}
        )
        run.model.zero_grad()
    # A limit that was not reached is no step; and all gradients were scaled alike.
    assert recipes[0] == recipes[1]
    assert not any(recipes[0])
    assert recipes[2] == recipes[3]
    assert all(recipes[2])
    assert {len(recipe) for recipe in recipes} == {1}
