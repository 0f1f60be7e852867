"""States kept in bfloat16: the same as rounding the plain optimizer's states after every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from offload_strategy.optimizer.states.precision import Precision, copy_rounded
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.runs import MakeOptimizer, Run, offloading
from tests.training import Numbers, assert_same_history

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "Adam": lambda m: Adam(m.parameters(), 1e-2),
    "AdamW fused": lambda m: AdamW(m.parameters(), 1e-2, fused=True),
    "AdamW foreach amsgrad": lambda m: AdamW(m.parameters(), 1e-2, foreach=True, amsgrad=True),
    "SGD momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9),
    "Adagrad": lambda m: Adagrad(m.parameters(), 1e-2),
}
NARROW = {"state_dtype": "bfloat16"}
BF16 = Precision(state_dtype=torch.bfloat16)


def _round(run: Run) -> None:
    """Do to a plain optimizer's states what keeping them in bfloat16 does."""
    for state in run.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(torch.bfloat16).to(value.dtype)


def _train(run: Run, clip: float | None = None) -> None:
    for number in range(6):
        run.optimizer.zero_grad()
        loss = run.backward(number)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), clip)
        run.optimizer.step()
        if run.engine is None:
            _round(run)
        run.note(loss)


@pytest.mark.parametrize("host", [None, "1MiB"])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of(
    name: str, overlap: str, clip: float | None, host: str | None, disk: Path
) -> None:
    plain = Run(OPTIMIZERS[name])
    _train(plain, clip)
    with offloading(disk, overlap, host, optimizer=NARROW) as engine:
        offloaded = Run(OPTIMIZERS[name], engine)
        _train(offloaded, clip)
    assert_same_history(offloaded.history, plain.history)


def _states(run: Run) -> Numbers:
    return {
        f"{index} {name}": value
        for index, state in run.optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def test_half_of_the_bytes_move(disk: Path) -> None:
    moved = {}
    for dtype in ("float32", "bfloat16"):
        parameter = torch.nn.Parameter(torch.ones(64, 64))
        whole = {"state_dtype": dtype, "subgroup_size": 10_000}
        with offloading(disk, "off", optimizer=whole) as engine:
            optimizer = engine.attach(None, Adam([parameter]))
            for _ in range(3):
                parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                # A write that the next step would overtake is given up.
                engine._resources.store.wait_for_writes()
            assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
            moved[dtype] = engine.metrics()["offload/optimizer/written_bytes"]
    assert moved["float32"] == 3 * 2 * parameter.numel() * 4
    assert moved["bfloat16"] == moved["float32"] / 2


def test_the_engine_asks_for_half_of_the_space() -> None:
    parameters = [torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(64))]
    optimizer = AdamW(parameters)
    assert check_supported(optimizer) == 2 * check_supported(optimizer, BF16)
    halves = AdamW([p.detach().bfloat16() for p in parameters])
    assert check_supported(halves) == check_supported(halves, BF16)


def test_states_of_other_precisions_stay_as_they_are(disk: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        parameter = torch.nn.Parameter(torch.arange(100.0).to(dtype))
        twin = torch.nn.Parameter(parameter.detach().clone())
        plain = AdamW([twin], 1e-2)
        with offloading(disk, optimizer=NARROW) as engine:
            optimizer = engine.attach(None, AdamW([parameter], 1e-2))
            for number in range(3):
                for tensor, its in ((parameter, optimizer), (twin, plain)):
                    tensor.grad = torch.full_like(tensor, 0.1 * (number + 1))
                    its.step()
            assert torch.equal(parameter, twin)
            for name, value in plain.state[twin].items():
                assert torch.equal(optimizer.state[parameter][name], value)


@pytest.mark.parametrize("from_plain", [True, False])
def test_a_state_dict_goes_from_one_precision_to_the_other(from_plain: bool, disk: Path) -> None:
    first = Run(OPTIMIZERS["AdamW fused"])
    with offloading(disk, optimizer=NARROW) as engine:
        second = Run(OPTIMIZERS["AdamW fused"], engine)
        source, target = (first, second) if from_plain else (second, first)
        _train(source)
        target.optimizer.load_state_dict(source.optimizer.state_dict())
        given, taken = _states(source), _states(target)
    assert given.keys() == taken.keys()
    for name, value in given.items():
        assert taken[name].dtype == value.dtype
        # What has no dimension stays in memory as it is.
        rounded = value.to(torch.bfloat16).to(value.dtype) if value.dim() else value
        assert torch.equal(taken[name], rounded)


def _rounded(value: float, update: int, count: int = 4096) -> torch.Tensor:
    generator = torch.Generator()
    generator.manual_seed(1 << 32 | update)
    kept = torch.empty(count, dtype=torch.bfloat16)
    copy_rounded(kept, torch.full((count,), value), generator)
    return kept


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    value = 1.0 + 0.3 / 128  # three tenths of a step above 1
    kept = _rounded(value, 0)
    assert set(kept.tolist()) == {1.0, 1.0 + 1 / 128}
    share = (kept > 1).float().mean().item()
    assert abs(share - 0.3) < 0.04  # five standard deviations
    assert torch.equal(kept, _rounded(value, 0))
    assert not torch.equal(kept, _rounded(value, 1))


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, float("inf"), float("-inf"), 2.0**-130])
def test_what_needs_no_rounding_stays(value: float) -> None:
    exact = torch.tensor(value).to(torch.bfloat16)
    assert bool((_rounded(exact.item(), 0) == exact).all())


def test_not_a_number_stays_what_it_is() -> None:
    assert bool(_rounded(float("nan"), 0).isnan().all())


@pytest.mark.parametrize("overlap", ["commit", "off", "eager"])
def test_small_changes_add_up_with_stochastic_rounding_alone(overlap: str, disk: Path) -> None:
    """An average that decays by a thousandth a step, of which bfloat16 has no step."""
    left = {}
    for stochastic in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(100, 100))
        options = {**NARROW, "stochastic_rounding": stochastic, "subgroup_size": "auto"}
        state = torch.get_rng_state()
        with offloading(disk, overlap, optimizer=options) as engine:
            optimizer = engine.attach(None, SGD([parameter], 0.0, momentum=0.999))
            for number in range(200):
                optimizer.zero_grad()
                (parameter * (1.0 if number == 0 else 0.0)).sum().backward()
                optimizer.step()
            left[stochastic] = optimizer.state[parameter]["momentum_buffer"].mean().item()
        assert torch.equal(torch.get_rng_state(), state)
    assert left[False] == 1.0
    assert abs(left[True] - 0.999**199) < 0.01
