"""Unsupported optimizers are refused with the reason; the check changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import packable
from offload_strategy.optimizer.user_class.compatibility import (
    check_supported,
)
from offload_strategy.optimizer.user_class.trial import is_elementwise
from tests.optimizer.custom_optimizers import (
    UNSUPPORTED,
    Lion,
    Twisted,
    coupled,
    noise,
    twisted,
)
from tests.optimizer.runs import EVERY_OVERLAP, compare, offloading, steps
from tests.training import Numbers, assert_same_bits, moved, settings


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_optimizers_are_refused_with_the_reason(name: str) -> None:
    make, reason = UNSUPPORTED[name]
    optimizer = make(_parameters((3, 4), (4,), (40, 40)))
    kind = type(optimizer).__name__
    with pytest.raises(ConfigError, match=rf"{kind} cannot be offloaded: it.*{reason}"):
        check_supported(optimizer)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_optimizers_train_with_their_states_in_memory(
    name: str, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial leaves no trace: neither in what they keep, nor in random numbers."""
    make, _ = UNSUPPORTED[name]

    def train(engine: OffloadEngine | None) -> Numbers:
        torch.manual_seed(0)
        np.random.seed(0)
        parameters = _parameters((3, 4), (4,), (40, 40))
        optimizer: Any = make(parameters)
        if engine is not None:
            optimizer = engine.attach(None, optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([p.sin().sum() for p in parameters]).sum()
            loss.backward()
            return loss

        for _ in range(8):
            optimizer.step(closure)
        return {str(i): p.detach().clone() for i, p in enumerate(parameters)}

    with OffloadEngine(settings(disk)) as engine:
        if "Counts" in make(_parameters((1,))).__class__.__name__:
            with pytest.raises(ConfigError, match="cannot be offloaded"):  # the trial counts, too
                train(engine)
            return
        try:
            plain = train(None)
        except (RuntimeError, ArithmeticError) as error:
            with pytest.raises(type(error)):
                train(engine)
            return
        assert_same_bits(train(engine), plain)
        assert moved(engine, "optimizer") == 0
    assert [each.levelname for each in caplog.records].count("WARNING") == 1
    assert "Its states stay in memory" in caplog.text
    with (
        OffloadEngine(settings(disk, optimizer={"enabled": True})) as engine,
        pytest.raises(ConfigError, match="cannot be offloaded"),
    ):
        train(engine)


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


def test_every_group_is_checked() -> None:
    first, second = _parameters((3, 4), (4,))
    groups = [{"params": [first]}, {"params": [second], "lr": None}]
    with pytest.raises(ConfigError, match="AdamW cannot be offloaded: it failed on two small"):
        check_supported(AdamW(groups))


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
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [p.detach().clone() for p in parameters]
    versions = [p._version for p in parameters]
    states = {n: v.clone() for p in parameters for n, v in optimizer.state[p].items()}
    attributes = {k: v for k, v in vars(optimizer).items() if k != "state"}
    random = torch.get_rng_state()
    check_supported(optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert {k: v for k, v in vars(optimizer).items() if k != "state"} == attributes
    assert len(optimizer.state) == 2
    for parameter, value in zip(parameters, values, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, torch.ones_like(parameter))  # type: ignore[arg-type]
    assert versions == [p._version for p in parameters]
    after = {n: v for p in parameters for n, v in optimizer.state[p].items()}
    assert all(torch.equal(states[name], after[name]) for name in states)


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


class ChangesGradients(SGD):
    """Adds weight decay to the gradients themselves, as older optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1)
                    p.sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_that_changes_gradients_is_noticed() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3, 3))]
    for kind, edits in ((ChangesGradients, True), (SGD, False), (AdamW, False)):
        optimizer = kind(parameters, lr=0.1)
        assert check_supported(optimizer).changes_gradients is edits


@pytest.mark.parametrize("overlap", ["commit", "off"])
def test_an_update_may_change_gradients(overlap: str, disk: Path) -> None:
    compare(
        lambda run: steps(run, 4), lambda m: ChangesGradients(m.parameters(), 0.05), disk, overlap
    )


# ---------------------------------------------------------------------- real updates
def _write(o: Any) -> float:
    o.norm = o.norm + 1
    return float(o.norm)


NOISY: dict[str, tuple[Any, str]] = {
    "draws": (lambda o, g, p, s: noise(p), "draws random numbers"),
    "couples": (lambda o, g, p, s: coupled(g), "when others are there"),
    "writes": (lambda o, g, p, s: _write(o), r"outside of their states \(norm\)"),
}


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("subgroup_size", [1, 10**6])
def test_what_no_trial_shows_is_refused_before_weights_change(
    kind: str, overlap: str, subgroup_size: int, disk: Path
) -> None:
    """A scheduler makes the optimizer noisy in its third step."""
    twist, reason = NOISY[kind]

    def train(engine: OffloadEngine | None, count: int) -> list[nn.Parameter]:
        parameters = _parameters((3, 4), (4,), (40, 40), (8,))
        optimizer: Any = Twisted(
            parameters, lambda o, g, p, s: twist(o, g, p, s) if g["noisy"] else None, norm=0.0
        )
        if engine is not None:
            optimizer = engine.attach(None, optimizer)
        for step in range(count):
            optimizer.param_groups[0]["noisy"] = step == 2
            optimizer.zero_grad()
            if step < 2:
                torch.stack([p.sin().sum() for p in parameters]).sum().backward()
                optimizer.step()
                continue
            with pytest.raises(OffloadError, match=rf"step 3: .*Twisted cannot.*{reason}.*enabled"):
                (
                    torch.stack([p.sin().sum() for p in parameters]).sum().backward(),
                    optimizer.step(),
                )
        return parameters

    expected = train(None, 2)
    options = {"overlap": overlap, "subgroup_size": subgroup_size}
    with OffloadEngine(settings(disk, optimizer=options)) as engine:
        for got, wanted in zip(train(engine, 3), expected, strict=True):
            assert torch.equal(got, wanted)


def test_an_update_ahead_of_step_must_leave_gradients_as_they_are(disk: Path) -> None:
    parameters = _parameters((3, 4), (4,))
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(
            None, Twisted(parameters, lambda o, g, p, s: p.grad.mul_(2) if g["noisy"] else None)
        )
        optimizer.param_groups[0]["noisy"] = True
        with pytest.raises(OffloadError, match="changes gradients"):
            torch.stack([p.sin().sum() for p in parameters]).sum().backward()


def test_random_numbers_of_other_threads_are_no_reason_to_stop(disk: Path) -> None:
    """The generators of torch belong to the process."""

    def train(engine: OffloadEngine | None) -> list[nn.Parameter]:
        parameters = _parameters((30, 40), (4,))
        optimizer: Any = AdamW(parameters)
        if engine is not None:
            optimizer = engine.attach(None, optimizer)
        for _ in range(20):
            optimizer.zero_grad()
            torch.stack([p.sin().sum() for p in parameters]).sum().backward()
            optimizer.step()
        return parameters

    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(10)

    expected = train(None)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with OffloadEngine(settings(disk)) as engine:
            for got, wanted in zip(train(engine), expected, strict=True):
                assert torch.equal(got, wanted)
            assert moved(engine, "optimizer") > 0
    finally:
        over.set()
        thread.join()


def test_a_matrix_is_sliced_only_if_matrices_are_updated_by_element() -> None:
    """GaLore, for example, updates everything but matrices by element."""
    project: Any = lambda o, g, p, s: p.grad.mean(0) if p.dim() == 2 else None  # noqa: E731
    for shapes, fits in (((400, 300), (50,)), False), (((400,), (50,)), True):
        optimizer = twisted(project)(_parameters(*shapes))
        assert is_elementwise(optimizer, optimizer.param_groups[0], Precision()) is fits
