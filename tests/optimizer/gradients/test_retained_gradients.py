"""Gradients that wait for the step on a tier: gone from memory, never wrong, and gone after it."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.idle_memory import IdleLimit
from offload_strategy.optimizer.gradients.gradient_backing import StoredGradient
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.runs import adamw
from tests.training import moved, on_disk, settings

WIDTH = 600  # a weight of 1.4 MB


def _engine(disk: Path, gradient_memory: str, **options: object) -> OffloadEngine:
    chosen = {"gradient_memory": gradient_memory, "subgroup_size": 100_000, **options}
    return OffloadEngine(settings(disk, optimizer=chosen, activations={"enabled": False}))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def _backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(3, WIDTH)).square().mean().backward()


def _stored(model: nn.Module) -> list[bool]:
    """Of each large gradient, whether it is on a tier."""
    gradients = [p.grad for p in model.parameters() if p.dim() == 2]
    assert all(isinstance(gradient, OffloadedGradient) for gradient in gradients)
    return [isinstance(g.backing._source, StoredGradient) for g in gradients]


def test_what_memory_has_no_room_for_waits_on_the_disk(disk: Path) -> None:
    with _engine(disk, "3MiB") as engine:
        model = _model()
        storages: list[weakref.ref[torch.UntypedStorage]] = []

        def note(parameter: torch.Tensor) -> None:
            """Runs before the engine's own hook, and sees the plain gradient."""
            assert parameter.grad is not None
            storages.append(weakref.ref(parameter.grad.untyped_storage()))

        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.register_post_accumulate_grad_hook(note)
        optimizer = engine.attach(model, adamw(model))
        _backward(model)
        on_disk(engine)
        # Backward goes from the last to the first: two of 1.4 MB find room.
        assert _stored(model) == [True, True, False, False]
        assert [storage() is None for storage in storages] == [False, False, True, True]
        optimizer.step()
        optimizer.zero_grad()
        states = 2 * sum(p.numel() * 4 for p in model.parameters())
        on_disk(engine)
        used = engine.metrics()["offload/tier/nvme/used_bytes"]
        assert states <= used < states + WIDTH * WIDTH * 4


def test_only_gradients_are_written_on_top(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: True)  # for new weights
    written = []
    for memory in ("4MiB", "1GiB"):
        with _engine(disk, memory) as engine:
            model = _model()
            optimizer = engine.attach(model, adamw(model))
            _backward(model)
            optimizer.step()
            on_disk(engine)
            written.append(moved(engine, "optimizer"))
    extra = written[0] - written[1]
    assert 2 * WIDTH * WIDTH * 4 <= extra <= 2 * (WIDTH * WIDTH * 4 + 4096)


def test_a_gradient_that_somebody_has_an_alias_of_stays(disk: Path) -> None:
    with _engine(disk, "1B") as engine:
        model = _model()
        kept = []
        weight = model[1].weight
        assert isinstance(weight, nn.Parameter)
        weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.detach()))  # type: ignore[union-attr]
        optimizer = engine.attach(model, adamw(model))  # with nobody holding it, it would go
        _backward(model)
        assert _stored(model) == [True, False, True, True]
        kept[0].zero_()
        gradient = weight.grad
        assert gradient is not None
        assert gradient.count_nonzero() == 0
        del optimizer


def test_the_tiers_must_have_room_for_them(disk: Path) -> None:
    model = _model()
    weights = sum(p.numel() * 4 for p in model.parameters())
    # Twice the states, once the weights, and not quite the gradients.
    capacity = 4 * weights + weights + weights // 2
    config = settings(disk, optimizer={"gradient_memory": "1B"}, activations={"enabled": False})
    config["tiers"][0]["capacity"] = capacity
    with (
        OffloadEngine(config) as engine,
        pytest.raises(ConfigError, match="too little"),
    ):
        engine.attach(model, adamw(model))
    config["optimizer"]["gradient_memory"] = "1GiB"
    with OffloadEngine(config) as engine:
        engine.attach(model, adamw(model))
