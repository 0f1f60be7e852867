"""Narrow states are updated a part at a time: the same bits as all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import ASGD, SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from offload_strategy.optimizer import subgroup_update as updates
from offload_strategy.optimizer.user_class import inner_step as parts
from offload_strategy.optimizer.user_class.inner_step import (
    can_update_in_chunks,
    run_update,
    update_in_chunks,
)
from offload_strategy.units import round_up
from tests.optimizer.runs import Run, offloading
from tests.optimizer.test_master_weights import backward, make_model

States = list[dict[str, Any]]

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, 1e-2),
    "AdamW fused": lambda p: AdamW(p, 1e-2, fused=True),
    "Adam foreach amsgrad": lambda p: Adam(p, 1e-2, foreach=True, amsgrad=True),
    "NAdam": lambda p: NAdam(p, 1e-2),
    "RAdam": lambda p: RAdam(p, 1e-2),
    "Adamax": lambda p: Adamax(p, 1e-2),
    "SGD momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "RMSprop": lambda p: RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: Rprop(p, 1e-2),
    "ASGD": lambda p: ASGD(p, 1e-2),
}
SHAPES = ((7, 64), (5,), (40, 33), (), (3, 8, 16), (1000,))


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CHUNK_ELEMENTS", 256)


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _give_gradients(weights: Sequence[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def _narrowed(states: States) -> tuple[States, list[dict[str, torch.dtype]]]:
    narrow: list[dict[str, torch.dtype]] = []
    for state in states:
        names = [n for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0]
        narrow.append({name: torch.float32 for name in names})
        state.update({name: state[name].bfloat16() for name in names})
    return states, narrow


def _borrow(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0x7F, dtype=torch.uint8)  # NaNs, if they were read


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_all_at_once(name: str) -> None:
    by_parts, whole = _weights(), _weights()
    optimizer = OPTIMIZERS[name](by_parts)
    run = partial(run_update, optimizer, optimizer.param_groups[0])
    kept: States = [{} for _ in SHAPES]
    _give_gradients(by_parts, 0)
    run(by_parts, kept)
    states = deepcopy(kept)
    _give_gradients(whole, 0)
    run(whole, [{} for _ in SHAPES])
    kept, narrow = _narrowed(kept)
    for step in range(1, 5):
        _give_gradients(by_parts, step)
        assert can_update_in_chunks(by_parts, kept)
        assert not update_in_chunks(run, by_parts, kept, narrow, _borrow, None)
        for state, names in zip(states, narrow, strict=True):
            state.update({n: state[n].bfloat16().float() for n in names})
        _give_gradients(whole, step)
        run(whole, states)
        for one, other in zip(by_parts, whole, strict=True):
            assert torch.equal(one, other)
        for one_state, other_state in zip(kept, states, strict=True):
            assert one_state.keys() == other_state.keys()
            for key, value in other_state.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(one_state[key], value.to(one_state[key].dtype))
                else:
                    assert one_state[key] == value


def test_scratch_is_as_large_as_a_part() -> None:
    weights = _weights()
    optimizer = OPTIMIZERS["AdamW fused"](weights)
    run = partial(run_update, optimizer, optimizer.param_groups[0])
    states: States = [{} for _ in SHAPES]
    _give_gradients(weights, 0)
    run(weights, states)
    asked: list[int] = []

    def borrow(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return _borrow(nbytes)

    states, narrow = _narrowed(states)
    update_in_chunks(run, weights, states, narrow, borrow, None)
    # 40 rows of 33 elements cannot be cut at a multiple of 64, and are the largest part.
    assert asked == [2 * 4 * round_up(40 * 33, 64)]


class _Late(SGD):
    """Has another state from its second update on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["updates"] = state.get("updates", 0) + 1
                if state["updates"] == 2:
                    state["late"] = 2 * weight.detach()


def test_states_that_come_later() -> None:
    weights = _weights()
    optimizer = _Late(weights, 0.1, momentum=0.9)
    run = partial(run_update, optimizer, optimizer.param_groups[0])
    states: States = [{} for _ in SHAPES]
    _give_gradients(weights, 0)
    run(weights, states)
    states, narrow = _narrowed(states)
    assert update_in_chunks(run, weights, states, narrow, _borrow, None)
    for weight, state in zip(weights, states, strict=True):
        assert state["updates"] == 2
        assert torch.equal(state["late"], 2 * weight)
    assert not update_in_chunks(run, weights, states, narrow, _borrow, None)


def test_what_cannot_go_by_parts() -> None:
    weight = torch.ones(4, 6)
    weight.grad = torch.ones(4, 6)
    assert can_update_in_chunks([weight], [{"a": torch.ones(4, 6).bfloat16(), "step": 1}])
    assert not can_update_in_chunks([weight], [{"a": torch.ones(6, 4).T.bfloat16()}])
    assert not can_update_in_chunks([weight], [{"a": torch.ones(1).bfloat16()}])
    weight.grad = torch.ones(6, 4).T
    assert not can_update_in_chunks([weight], [{}])
    weight.grad = torch.ones(4, 6).to_sparse(1)
    assert not can_update_in_chunks([weight], [{}])
    weight.grad = None
    assert not can_update_in_chunks([weight], [{}])


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_training_in_parts_is_as_in_one(
    overlap: str, stochastic: bool, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(elements: int) -> list[torch.Tensor]:
        monkeypatch.setattr(parts, "CHUNK_ELEMENTS", elements)
        narrow = {
            "state_dtype": "bfloat16",
            "stochastic_rounding": stochastic,
            "subgroup_size": 10_000,
        }
        with offloading(disk, overlap, optimizer=narrow) as engine:
            run = Run(lambda m: AdamW(m.parameters(), 1e-2), engine)
            losses = []
            for number in range(5):
                run.optimizer.zero_grad()
                losses.append(run.backward(number).detach())
                run.optimizer.step()
            states = run.optimizer.state_dict()["state"].values()
            averages = [state["exp_avg"] for state in states]
            return [*losses, *(p.detach() for p in run.model.parameters()), *averages]

    # With noise the order of the draws counts, which depends on the parts.
    one = trained(parts.CHUNK_ELEMENTS if stochastic else 1 << 20)
    for value, expected in zip(trained(256), one, strict=True):
        assert torch.equal(value, expected)


class _Refuses(AdamW):
    """Fails once, in the middle of an update by parts."""

    left = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if type(self).left == 1:
            type(self).left = 0
            raise RuntimeError("refused")
        if type(self).left:
            type(self).left -= 1
        super().step(closure)


def test_an_update_that_fails_loses_no_state(disk: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    whole = {"state_dtype": "bfloat16", "subgroup_size": 10_000}
    with offloading(disk, "off", optimizer=whole) as engine:
        optimizer = engine.attach(None, _Refuses([parameter], 1e-2))
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        before = optimizer.state[parameter]
        _Refuses.left = 3
        parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match="refused"):
            optimizer.step()
        assert _Refuses.left == 0
        kept = optimizer.state[parameter]
        assert kept.keys() == before.keys()
        assert kept["exp_avg"].dtype == torch.float32
        # What was updated before it failed is new, the rest as it was.
        rest = slice(8, None)
        assert torch.equal(kept["exp_avg"][rest], before["exp_avg"][rest])
        assert not torch.equal(kept["exp_avg"][:8], before["exp_avg"][:8])
        assert kept["step"] == before["step"]
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == before["step"] + 1
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_masters_in_parts_are_as_in_one(
    state_dtype: str, overlap: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()
    run_kernel = run_update

    def noted(*args: Any) -> None:
        sizes.add(max(weight.numel() for weight in args[2]))
        assert all(weight.dtype == torch.float32 for weight in args[2])
        run_kernel(*args)

    monkeypatch.setattr(updates, "run_update", noted)

    def trained(elements: int) -> list[torch.Tensor]:
        monkeypatch.setattr(parts, "CHUNK_ELEMENTS", elements)
        options = {"state_dtype": state_dtype, "master_weights": True, "subgroup_size": 10_000}
        with offloading(disk, overlap, optimizer=options) as engine:
            model = make_model(torch.bfloat16)
            optimizer = engine.attach(model, AdamW(model.parameters(), 1e-3))
            for number in range(5):
                backward(model, number)
                optimizer.step()
            kept = optimizer.state_dict()["state"].values()
            values = [v for state in kept for v in state.values() if isinstance(v, torch.Tensor)]
            return [*(p.detach() for p in model.parameters()), *values]

    one = trained(1 << 20)
    largest = max(sizes)
    for value, expected in zip(trained(256), one, strict=True):
        assert torch.equal(value, expected)
    assert min(sizes) < largest
