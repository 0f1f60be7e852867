"""Where new weights wait for `step()` with ``overlap: commit`` on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from offload_strategy import OffloadEngine
from offload_strategy.host_memory.idle_memory import IdleLimit
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.subgroup_update import Updater
from tests.optimizer.runs import let_gradients_leave, offloading
from tests.training import assert_same_bits

_WIDTH, _STEPS = 64, 3
_WEIGHTS = 4 * _WIDTH * _WIDTH * 4

Watch = Callable[[nn.Module], None]


def _nothing(model: nn.Module) -> None:
    pass


def _train(
    engine: OffloadEngine | None, watch: Watch = _nothing, layers: int = 4, begin: Watch = _nothing
) -> nn.Module:
    """Train; `begin` gets the model before it is attached, `watch` after each backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    begin(model)
    optimizer: Optimizer = AdamW(model.parameters(), 1e-2, fused=True)
    if engine is not None:
        optimizer = engine.attach(None, optimizer)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, _WIDTH)).pow(2).sum().backward()
        watch(model)
        optimizer.step()
    return model


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AheadUpdate]]:
    """Updates ahead of `step()`, in order."""
    found: list[AheadUpdate] = []
    update_ahead = Updater.update_ahead

    def noted(self: Updater, *arguments: object) -> AheadUpdate:
        found.append(update_ahead(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Updater, "update_ahead", noted)
    yield found
    found.clear()


@pytest.mark.parametrize("has_room", [True, False])
def test_new_weights_stay_in_memory_where_there_is_room(
    has_room: bool, disk: Path, monkeypatch: pytest.MonkeyPatch, aheads: list[AheadUpdate]
) -> None:
    let_gradients_leave(monkeypatch)
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: has_room)
    in_memory: list[bool] = []

    def watch(model: nn.Module) -> None:
        ran = aheads[len(in_memory) :]  # and not those whose states came too late
        in_memory.extend(bool(ahead.new_weights.tensors) for ahead in ran)
        engine._resources.store.wait_for_writes()  # step() would cancel them

    with offloading(disk, optimizer={"subgroup_size": _WIDTH * _WIDTH}) as engine:
        trained = _train(engine, watch)
        engine._resources.store.wait_for_writes()
        written = engine.metrics()["offload/optimizer/written_bytes"]
        assert engine._resources.pool._limit.waiting == 0
    assert in_memory
    assert set(in_memory) == {has_room}
    # Two states and, of what was updated ahead, gradients and, without room, new weights.
    ahead = len(in_memory) * _WEIGHTS // 4
    assert written == _STEPS * 2 * _WEIGHTS + ahead * (2 - has_room)
    assert_same_bits(dict(trained.named_parameters()), dict(_train(None).named_parameters()))


def test_new_weights_take_the_memory_of_gradients_that_leave(
    disk: Path, monkeypatch: pytest.MonkeyPatch, aheads: list[AheadUpdate]
) -> None:
    let_gradients_leave(monkeypatch)
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: True)
    addresses: list[int] = []
    with offloading(disk, optimizer={"subgroup_size": _WIDTH * _WIDTH}) as engine:
        torch.manual_seed(0)
        model = nn.Linear(_WIDTH, _WIDTH, bias=False)
        optimizer = engine.attach(None, AdamW(model.parameters(), fused=True))
        model.weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
        model(torch.ones(2, _WIDTH)).sum().backward()
        (new,) = aheads[-1].new_weights.tensors
        assert new.data_ptr() == addresses[-1]
        # The gradient has the same values elsewhere.
        assert torch.equal(model.weight.grad, torch.full((_WIDTH, _WIDTH), 2.0))
        del new
        optimizer.step()


@pytest.mark.parametrize("kind", ["alias", "numpy", "strides"])
def test_a_gradient_whose_memory_others_use_keeps_it(
    kind: str, disk: Path, monkeypatch: pytest.MonkeyPatch, aheads: list[AheadUpdate]
) -> None:
    let_gradients_leave(monkeypatch)
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: True)
    kept: list[object] = []

    def keep(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if kind == "strides":
            parameter.grad = gradient.t().contiguous().t()
        else:
            kept.append(gradient.numpy() if kind == "numpy" else gradient.view(-1))

    def begin(model: nn.Module) -> None:
        model[0].weight.register_post_accumulate_grad_hook(keep)

    def watch(model: nn.Module) -> None:
        if len(kept) == 1:  # later ones are not updated ahead
            expected = torch.as_tensor(kept[0]).reshape(_WIDTH, _WIDTH)
            assert torch.equal(model[0].weight.grad, expected)
            assert aheads[0].new_weights.tensors[0].data_ptr() != expected.data_ptr()

    with offloading(disk, optimizer={"subgroup_size": _WIDTH * _WIDTH}) as engine:
        trained = _train(engine, watch, layers=1, begin=begin)
        expected = _train(None, layers=1, begin=begin)
        assert_same_bits(dict(trained.named_parameters()), dict(expected.named_parameters()))
