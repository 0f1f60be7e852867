"""Master weights: as if a plain optimizer had copies of the weights in float32."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload_strategy.optimizer.states.precision import MASTER_WEIGHT, Precision
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.runs import offloading
from tests.training import Numbers, assert_same_bits

Make = Callable[[Iterable[torch.Tensor]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, 1e-3),
    "AdamW fused": lambda p: AdamW(p, 1e-3, fused=True),
    "Adam foreach amsgrad": lambda p: Adam(p, 1e-3, foreach=True, amsgrad=True),
    "SGD momentum": lambda p: SGD(p, 0.01, momentum=0.9),
    "SGD": lambda p: SGD(p, 0.01),
}
MASTERS = {"master_weights": True}
STEPS = 6


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 160), nn.GELU(), nn.Linear(160, 8)).to(dtype)


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    x = torch.randn(12, 24, generator=generator).to(dtype)
    model(x).float().pow(2).mean().backward()


class Reference:
    """A model whose weights are updated by hand, in float32."""

    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        self.model = make_model(dtype)
        self.masters = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master)

    def numbers(self) -> Numbers:
        states = [self.optimizer.state[master] for master in self.masters]
        for state, master in zip(states, self.masters, strict=True):
            state[MASTER_WEIGHT] = master.detach()
        found = numbers(self.model, states)
        for state in states:
            del state[MASTER_WEIGHT]
        return found


def numbers(model: nn.Module, states: Iterable[dict[str, Any]]) -> Numbers:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, state in enumerate(states):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{index} {name}"] = value.clone()
    return found


def of(model: nn.Module, optimizer: Optimizer) -> Numbers:
    return numbers(model, [optimizer.state[p] for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of(name: str, overlap: str, dtype: torch.dtype, disk: Path) -> None:
    reference = Reference(OPTIMIZERS[name], dtype)
    model = make_model(dtype)
    with offloading(disk, overlap, optimizer=MASTERS) as engine:
        optimizer = engine.attach(None, OPTIMIZERS[name](model.parameters()))
        for number in range(STEPS):
            backward(reference.model, number)
            reference.step()
            backward(model, number)
            optimizer.step()
            assert_same_bits(of(model, optimizer), reference.numbers())


def test_updates_too_small_for_the_weights_add_up(disk: Path) -> None:
    ends = {}
    for masters in (False, True):
        parameter = nn.Parameter(torch.ones(64, 4, dtype=torch.bfloat16))
        with offloading(disk, optimizer={"master_weights": masters}) as engine:
            optimizer = engine.attach(None, SGD([parameter], lr=1e-4))
            for _ in range(100):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        ends[masters] = parameter.detach().float().mean().item()
    assert ends[False] == 1.0
    assert ends[True] == pytest.approx(0.99, abs=0.004)


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_weights_that_somebody_changes_count(overlap: str, disk: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    reference, model = Reference(make, torch.bfloat16), make_model(torch.bfloat16)
    with offloading(disk, overlap, optimizer=MASTERS) as engine:
        optimizer = engine.attach(None, make(model.parameters()))
        for number in range(STEPS):
            for one in (reference.model, model):
                with torch.no_grad():
                    if number == 3:
                        one[0].weight.clamp_(-0.05, 0.05)
            if number == 3:
                # What was not touched keeps the bits that the weight does not have.
                master, weight = reference.masters[0].data, reference.model[0].weight.detach()
                changed = master.to(weight.dtype) != weight
                assert changed.any()
                assert not changed.all()
                master[changed] = weight[changed].float()
            backward(reference.model, number)
            reference.step()
            backward(model, number)
            optimizer.step()
            assert_same_bits(of(model, optimizer), reference.numbers())


@pytest.mark.parametrize("overlap", ["commit", "eager"])
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(overlap: str, disk: Path) -> None:
    make = OPTIMIZERS["AdamW fused"]
    reference = Reference(make, torch.bfloat16)
    file = io.BytesIO()
    model = make_model(torch.bfloat16)
    for first in (0, STEPS // 2):
        with offloading(disk, overlap, optimizer=MASTERS) as engine:
            optimizer = engine.attach(None, make(model.parameters()))
            if first:
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for number in range(first, first + STEPS // 2):
                backward(reference.model, number)
                reference.step()
                backward(model, number)
                optimizer.step()
            assert_same_bits(of(model, optimizer), reference.numbers())
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, file)
        model = make_model(torch.bfloat16)


def test_checkpoints_go_to_plain_optimizers_and_come_from_them(disk: Path) -> None:
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
    plain = AdamW(other.parameters(), 1e-3)
    with offloading(disk, optimizer=MASTERS) as engine:
        optimizer = engine.attach(None, AdamW(model.parameters(), 1e-3))
        backward(model, 0)
        optimizer.step()
        plain.load_state_dict(optimizer.state_dict())
        backward(other, 1)
        plain.step()
        optimizer.load_state_dict(plain.state_dict())
        backward(model, 2)
        optimizer.step()
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            kinds = {name: v.dtype for name, v in state.items() if v.dim() > 0}
            assert kinds == dict.fromkeys(("exp_avg", "exp_avg_sq", MASTER_WEIGHT), torch.float32)


def test_weights_of_float32_have_none(disk: Path) -> None:
    plain, model = make_model(torch.float32), make_model(torch.float32)
    own = AdamW(plain.parameters(), 1e-3)
    with offloading(disk, optimizer=MASTERS) as engine:
        optimizer = engine.attach(None, AdamW(model.parameters(), 1e-3))
        for number in range(3):
            for one, its in ((plain, own), (model, optimizer)):
                backward(one, number)
                its.step()
        assert_same_bits(of(model, optimizer), of(plain, own))


def test_states_in_bfloat16_leave_the_masters_as_they_are(disk: Path) -> None:
    make = OPTIMIZERS["AdamW"]
    reference, model = Reference(make, torch.bfloat16), make_model(torch.bfloat16)
    with offloading(disk, optimizer={**MASTERS, "state_dtype": "bfloat16"}) as engine:
        optimizer = engine.attach(None, make(model.parameters()))
        for number in range(STEPS):
            backward(reference.model, number)
            reference.step()
            for state in reference.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].bfloat16().float()
            backward(model, number)
            optimizer.step()
            assert_same_bits(of(model, optimizer), reference.numbers())


def test_what_the_states_take() -> None:
    parameters = [nn.Parameter(torch.zeros(30, 8, dtype=torch.bfloat16))]
    optimizer = AdamW(parameters)
    assert check_supported(optimizer) == 240 * 4
    assert check_supported(optimizer, Precision(master_weights=True)) == 240 * 12
    narrow = Precision(state_dtype=torch.bfloat16, master_weights=True)
    assert check_supported(optimizer, narrow) == 240 * 8


def test_an_update_that_fails_loses_no_master(disk: Path) -> None:
    class Moody(AdamW):
        moods = 0

        def step(self, closure: Any = None) -> Any:
            if self.__dict__.get("raises"):
                raise LookupError
            return super().step.__wrapped__(self)  # type: ignore[attr-defined]

    model = make_model(torch.bfloat16)
    inner = Moody(model.parameters(), 1e-3)
    with offloading(disk, "off", optimizer=MASTERS) as engine:
        optimizer = engine.attach(None, inner)
        backward(model, 0)
        optimizer.step()
        before = [optimizer.state[p][MASTER_WEIGHT] for p in model.parameters()]
        inner.raises = True  # type: ignore[attr-defined]
        backward(model, 1)
        with pytest.raises(LookupError):
            optimizer.step()
        after = [optimizer.state[p][MASTER_WEIGHT] for p in model.parameters()]
        assert all(map(torch.equal, before, after))


class TestLoading:
    """`load_state_dict` brings tensors to their parameters as a plain optimizer does."""

    @pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", ["AdamW", "Adam foreach amsgrad", "SGD momentum"])
    def test_dtypes(self, name: str, own: torch.dtype, stored: torch.dtype, disk: Path) -> None:
        source = make_model(stored)
        giver = OPTIMIZERS[name](source.parameters())
        backward(source, 0)
        giver.step()
        plain, model = make_model(own), make_model(own)
        expected = OPTIMIZERS[name](plain.parameters())
        expected.load_state_dict(giver.state_dict())
        with offloading(disk) as engine:
            optimizer = engine.attach(None, OPTIMIZERS[name](model.parameters()))
            optimizer.load_state_dict(giver.state_dict())
            assert_same_bits(of(model, optimizer), of(plain, expected))
            for one, its in ((plain, expected), (model, optimizer)):
                backward(one, 1)
                its.step()
            assert_same_bits(of(model, optimizer), of(plain, expected))

    def test_states_of_parameters_that_are_not_there_are_kept(self, disk: Path) -> None:
        parameter = nn.Parameter(torch.ones(8, 8))
        given = AdamW([parameter])
        parameter.grad = torch.ones_like(parameter)
        given.step()
        saved = given.state_dict()
        saved["state"][17] = {"exp_avg": torch.ones(3)}
        other = nn.Parameter(torch.ones(8, 8))
        with offloading(disk) as engine:
            optimizer = engine.attach(None, AdamW([other]))
            optimizer.load_state_dict(saved)
            kept = optimizer.state_dict()["state"][17]["exp_avg"]
            assert torch.equal(kept, torch.ones(3))
