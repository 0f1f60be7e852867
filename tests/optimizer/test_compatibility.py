"""Unsupported optimizers are refused with the reason; the check changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.subgroups import packable
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.custom_optimizers import (
    UNSUPPORTED,
    Lion,
    Twisted,
    coupled,
    noise,
    twisted,
)
from tests.optimizer.runs import EVERY_OVERLAP, compare, offloading, steps
from tests.training import Numbers, assert_same_bits, in_turn, moved, settings


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _train(optimizer: Any, parameters: list[nn.Parameter], count: int) -> Numbers:
    """Take steps by closures; return the weights."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([p.sin().sum() for p in parameters]).sum()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)
    return {str(index): p.detach().clone() for index, p in enumerate(parameters)}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_optimizers_train_with_their_states_in_memory_or_are_refused_with_the_reason(
    name: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial leaves no trace: neither in what they keep, nor in random numbers."""
    make, reason = UNSUPPORTED[name]

    def train(engine: OffloadEngine | None) -> Numbers:
        torch.manual_seed(0)
        np.random.seed(0)
        parameters = _parameters((3, 4), (4,), (40, 40))
        optimizer = make(parameters)
        return _train(
            optimizer if engine is None else engine.attach(None, optimizer), parameters, 8
        )

    kind = type(make(_parameters((1,)))).__name__
    refused = rf"{kind} cannot be offloaded: it.*{reason}"
    with (
        OffloadEngine(settings(disk, optimizer={"enabled": True})) as engine,
        pytest.raises(ConfigError, match=refused),
    ):
        train(engine)
    with OffloadEngine(settings(disk)) as engine:
        if kind == "CountsOutside":
            with pytest.raises(ConfigError, match=refused):  # the trial counts, too
                train(engine)
            return
        try:
            plain = train(None)
        except (RuntimeError, ArithmeticError, TypeError) as error:
            with pytest.raises(type(error)):
                train(engine)
            return
        assert_same_bits(train(engine), plain)
        assert moved(engine, "optimizer") == 0
    assert [each.levelname for each in caplog.records].count("WARNING") == 1
    assert "Its states stay in memory" in caplog.text


def test_hooks_may_hold_parameters() -> None:
    """As averages of weights do: an update of a subgroup does not run hooks."""

    class Average:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            self.parameters = parameters

        def __call__(self, *_: Any) -> None: ...

    parameters = _parameters((3, 4), (4,))
    optimizer = AdamW(parameters)
    optimizer.register_step_post_hook(Average(parameters))
    check_supported(optimizer)


def test_a_group_that_is_added_later_is_checked(disk: Path) -> None:
    first, second, third = _parameters((3, 4), (4,), (2, 2))
    with offloading(disk) as engine:
        optimizer = engine.attach(None, AdamW([first]))
        with pytest.raises(ConfigError, match="AdamW cannot be offloaded: it failed on two small"):
            optimizer.add_param_group({"params": [second], "lr": None})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": [third], "lr": 0.1})
        third.grad = torch.ones_like(third)
        optimizer.step()
        assert optimizer.state[third]["exp_avg"].shape == (2, 2)


def test_parameters_without_memory_are_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="parameters on the meta device"):
        check_supported(AdamW(net.parameters()))


def test_the_check_changes_nothing() -> None:
    parameters = _parameters((30, 40), (4,))
    optimizer = AdamW(parameters)
    _train(optimizer, parameters, 1)

    def everything() -> tuple[Numbers, dict[str, Any], list[int]]:
        numbers: Numbers = {"random": torch.get_rng_state()}
        for p in parameters:
            numbers |= {f"{id(p)}{n}": v.clone() for n, v in optimizer.state[p].items()}
            numbers |= {f"{id(p)}": p.detach().clone(), f"{id(p)}.grad": p.grad.clone()}  # type: ignore[union-attr]
        attributes = {name: value for name, value in vars(optimizer).items() if name != "state"}
        return numbers, attributes, [len(optimizer.state), *(p._version for p in parameters)]

    numbers, *others = everything()
    check_supported(optimizer)
    numbers_after, *others_after = everything()
    assert_same_bits(numbers_after, numbers)
    assert others_after == others


SIZES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Adam amsgrad": lambda p: Adam(p, amsgrad=True),
    "SGD": lambda p: SGD(p, 0.1),
    "SGD momentum for some": lambda p: SGD([{"params": p[:2]}, {"params": p[2:], "momentum": 0.9}]),
    "RMSprop centered": lambda p: RMSprop(p, centered=True),
    "ASGD": lambda p: ASGD(p),
    "Adafactor": lambda p: Adafactor(p),
    "Lion": lambda p: Lion(p, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SIZES)
def test_state_bytes_are_known_in_advance(kind: str, dtype: torch.dtype) -> None:
    parameters = _parameters((20, 30), (7, 3), (50,), (4, 20, 3), (), dtype=dtype)
    optimizer = SIZES[kind](parameters)
    expected = sum(check_supported(optimizer).state_bytes)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if packable(value)
    )
    if kind == "Adafactor":  # its tensors of three dimensions are not among those tried
        assert abs(expected - held) <= 0.5 * held
    else:
        assert expected == held


def _decay_gradients(o: Any, g: Any, p: torch.Tensor, s: Any) -> None:
    """Add weight decay to the gradients themselves, as older optimizers do."""
    p.grad.add_(p, alpha=0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_an_update_may_change_gradients(overlap: str, disk: Path) -> None:
    make = twisted(_decay_gradients)
    compare(lambda run: steps(run, 4), lambda m: make(m.parameters()), disk, overlap)


# ---------------------------------------------------------------------- real updates
def _write(o: Any) -> float:
    o.norm = o.norm + 1
    return float(o.norm)


NOISY: dict[str, tuple[Any, str]] = {
    "draws": (lambda o, g, p, s: noise(p), "draws random numbers"),
    "couples": (lambda o, g, p, s: coupled(g), "when others are there"),
    "writes": (lambda o, g, p, s: _write(o), r"outside of their states \(norm\)"),
}


@pytest.mark.parametrize(("given", "overlap"), in_turn(product(NOISY, (1, 10**6)), EVERY_OVERLAP))
def test_what_no_trial_shows_is_refused_before_weights_change(
    given: tuple[str, int], overlap: str, disk: Path
) -> None:
    """A scheduler makes the optimizer noisy in its third step."""
    kind, subgroup_size = given
    twist, reason = NOISY[kind]

    def make() -> tuple[Any, list[nn.Parameter]]:
        parameters = _parameters((3, 4), (4,), (40, 40), (8,))
        return Twisted(
            parameters, lambda o, g, p, s: twist(o, g, p, s) if g["noisy"] else None, norm=0.0
        ), parameters

    expected = _train(*make(), 2)
    options = {"overlap": overlap, "subgroup_size": subgroup_size}
    with OffloadEngine(settings(disk, optimizer=options)) as engine:
        inner, parameters = make()
        optimizer = engine.attach(None, inner)
        _train(optimizer, parameters, 2)
        optimizer.param_groups[0]["noisy"] = True
        with pytest.raises(OffloadError, match=rf"step 3: .*Twisted cannot.*{reason}.*enabled"):
            _train(optimizer, parameters, 1)
        assert_same_bits(_train(optimizer, parameters, 0), expected)


def test_an_update_ahead_of_step_must_leave_gradients_as_they_are(disk: Path) -> None:
    parameters = _parameters((3, 4), (4,))
    inner = Twisted(parameters, lambda o, g, p, s: p.grad.mul_(2) if g["noisy"] else None)
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(None, inner)
        optimizer.param_groups[0]["noisy"] = True
        with pytest.raises(OffloadError, match="changes gradients"):
            _train(optimizer, parameters, 1)


def test_random_numbers_of_other_threads_are_no_reason_to_stop(disk: Path) -> None:
    """The generators of torch belong to the process."""
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(10)

    plain, parameters = _parameters((30, 40), (4,)), _parameters((30, 40), (4,))
    expected = _train(AdamW(plain), plain, 8)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with OffloadEngine(settings(disk)) as engine:
            optimizer = engine.attach(None, AdamW(parameters))
            assert_same_bits(_train(optimizer, parameters, 8), expected)
            assert moved(engine, "optimizer") > 0
    finally:
        over.set()
        thread.join()
