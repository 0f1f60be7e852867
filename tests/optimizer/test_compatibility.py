"""Unsupported optimizers are refused with the reason; the check changes nothing."""

import threading
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from offload_strategy import ConfigError, OffloadEngine, OffloadError
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.custom_optimizers import QUANTIZED, UNSUPPORTED, Twisted, coupled, noise
from tests.optimizer.runs import EVERY_OVERLAP, OPTIMIZERS, offloading
from tests.training import assert_same_bits, attached, in_turn, moved, on_disk, settings


def _parameters(*shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def _train(optimizer, parameters, count):
    """Take steps by closures; return the weights."""

    def closure():
        optimizer.zero_grad()
        loss = torch.stack([p.sin().sum() for p in parameters]).sum()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)
    return {str(index): p.detach().clone() for index, p in enumerate(parameters)}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_optimizers_keep_their_states_in_memory_or_are_refused(name, disk, caplog):
    """The trial leaves no trace: neither in what they keep, nor in random numbers."""
    make, reason = UNSUPPORTED[name]

    def train(engine):
        torch.manual_seed(0)
        np.random.seed(0)
        parameters = _parameters((3, 4), (4,), (40, 40))
        return _train(attached(engine, None, make(parameters)), parameters, 8)

    kind = type(make(_parameters((1,)))).__name__
    refused = rf"{kind} cannot be offloaded: it.*{reason}"
    with (
        OffloadEngine(settings(disk, optimizer={"enabled": True})) as engine,
        pytest.raises(ConfigError, match=refused),
    ):
        train(engine)
    # 'auto' means the same whether it is written in the config or not.
    with OffloadEngine(settings(disk, optimizer={"enabled": "auto"})) as engine:
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


def test_a_group_that_is_added_later_is_checked(disk):
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


SIZED = [
    *("AdamW", "Adam amsgrad fused", "SGD", "RMSprop centered foreach", "ASGD", "Adafactor"),
    *("of somebody else's", "SGD momentum for some"),
]
MAKE = {
    **OPTIMIZERS,
    "SGD momentum for some": lambda p: SGD([{"params": p[:2]}, {"params": p[2:], "momentum": 0.9}]),
    **QUANTIZED,
}
ROUNDED = Precision(state_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "per_element"),
    [
        *((*each, Precision(), None) for each in product(SIZED, [torch.float32, torch.bfloat16])),
        ("AdamW", torch.float32, Precision(), 8),
        ("AdamW", torch.float32, ROUNDED, 4),
        ("AdamW", torch.bfloat16, ROUNDED, 4),
        ("AdamW", torch.bfloat16, Precision(master_weights=True), 12),
        ("AdamW", torch.bfloat16, Precision(torch.bfloat16, master_weights=True), 8),
        ("momentum", torch.float32, Precision(), 1),
        ("torchao AdamW8bit", torch.float32, Precision(), 2),
        ("torchao AdamW4bit", torch.float32, Precision(), 1),
        ("torchao AdamWFp8", torch.float32, Precision(), 2),
        ("bitsandbytes AdamW8bit", torch.float32, Precision(), 2),
    ],
)
@pytest.mark.usefixtures("uncompiled")
def test_bytes_of_states_are_known_and_all_that_is_moved(kind, dtype, precision, per_element, disk):
    # Of whole pages.
    shapes = ((64, 64), (32, 64), (2048,), (16, 32, 8))
    if kind in QUANTIZED:
        shapes = ((512, 768), (64, 64), (64,), (9,))
    parameters = nn.ParameterList(_parameters(*shapes, dtype=dtype))
    expected = sum(check_supported(MAKE[kind](parameters), precision).state_bytes)
    # Tensors of three dimensions are not among those on which Adafactor is tried.
    error = {"Adafactor": 0.5, **dict.fromkeys(QUANTIZED, 0.1)}.get(kind, 0.0)
    if per_element is not None:
        elements = sum(p.numel() for p in parameters)
        assert expected == pytest.approx(per_element * elements, rel=error)
    options = {"master_weights": precision.master_weights, "subgroup_size": 10**6}
    options["state_dtype"] = "float32" if precision.state_dtype is None else "bfloat16"
    with offloading(disk, "off", optimizer=options) as engine:
        optimizer = engine.attach(None, MAKE[kind](parameters))
        for step in (1, 2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            on_disk(engine)  # the next step would cancel a write that is not finished
            assert moved(engine, "optimizer") == pytest.approx(step * expected, rel=error)


# ---------------------------------------------------------------------- real updates
NOISY = {
    "draws": (noise, "draws random numbers"),
    "couples": (coupled, "when others are there"),
    "writes": (lambda o, g, p, s: o.norms.append(1), r"outside of their states \(norms\)"),
}


@pytest.mark.parametrize(("given", "overlap"), in_turn(product(NOISY, (1, 10**6)), EVERY_OVERLAP))
def test_what_no_trial_shows_is_refused_before_weights_change(given, overlap, disk):
    """A scheduler makes the optimizer noisy in its third step."""
    kind, subgroup_size = given
    twist, reason = NOISY[kind]

    def make():
        parameters = _parameters((3, 4), (4,), (40, 40), (8,))
        return Twisted(
            parameters, lambda o, g, p, s: twist(o, g, p, s) if g["noisy"] else None, norms=[]
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


def test_an_update_ahead_of_step_must_leave_gradients_as_they_are(disk):
    parameters = _parameters((3, 4), (4,))
    inner = Twisted(parameters, lambda o, g, p, s: p.grad.mul_(2) if g["noisy"] else None)
    with OffloadEngine(settings(disk)) as engine:
        optimizer = engine.attach(None, inner)
        optimizer.param_groups[0]["noisy"] = True
        with pytest.raises(OffloadError, match="changes gradients"):
            _train(optimizer, parameters, 1)


def test_random_numbers_of_other_threads_are_no_reason_to_stop(disk):
    """The generators of torch belong to the process."""
    over = threading.Event()

    def draw():
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
