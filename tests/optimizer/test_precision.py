"""Stored dtypes, stochastic rounding, master weights and updates in chunks, bit by bit."""

import copy
import io
from itertools import product

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from offload_strategy.optimizer.states.precision import MASTER_WEIGHT, copy_rounded
from offload_strategy.optimizer.user_class import inner_step
from tests.optimizer.custom_optimizers import Twisted
from tests.optimizer.runs import EVERY_OVERLAP, OPTIMIZERS, offloading, snapshot
from tests.training import assert_same_bits, bits, in_turn


def _come_late(o, g, p, s):
    """Add another state in the second update."""
    if s["step"] == 2:
        s["late"] = 2 * p.detach()


MAKE = {
    **OPTIMIZERS,
    "Adagrad": lambda m: Adagrad(m.parameters(), 1e-2),
    "a late state": lambda m: Twisted(m.parameters(), _come_late),
}
MASTERS = {"master_weights": True}
BFLOAT16 = {"state_dtype": "bfloat16"}
STEPS = 6


def make_model(dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 160), nn.GELU(), nn.Linear(160, 8)).to(dtype)


def backward(model, number):
    model.zero_grad()
    x = torch.randn(12, 24, generator=torch.Generator().manual_seed(number))
    model(x.to(model[0].weight.dtype)).float().pow(2).mean().backward()


class Reference:
    """A model that a plain optimizer trains, in float32 copies or with rounded states if wanted."""

    def __init__(self, name, dtype, options):
        self.model = make_model(dtype)
        self.has_masters = "master_weights" in options and dtype.itemsize == 2
        self.rounds = "state_dtype" in options and (self.has_masters or dtype is torch.float32)
        masters = list(self.model.parameters())
        if self.has_masters:
            masters = [nn.Parameter(p.detach().float()) for p in masters]
        self.pairs = list(zip(self.model.parameters(), masters, strict=True))
        self.optimizer = MAKE[name](nn.ParameterList(masters))

    @torch.no_grad()
    def step(self):
        for parameter, master in self.pairs:
            assert parameter.grad is not None
            # Where somebody has changed the weight, it counts; elsewhere the copy has more bits.
            changed = master.to(parameter.dtype) != parameter
            master.data[changed] = parameter[changed].to(master.dtype)
            master.grad = parameter.grad.to(master.dtype)
        self.optimizer.step()
        for parameter, master in self.pairs:
            parameter.copy_(master)
        for state in self.optimizer.state.values() if self.rounds else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[name] = value.to(torch.bfloat16).to(value.dtype)

    @property
    def state(self):
        """As of an optimizer of the model's parameters."""
        states = {p: dict(self.optimizer.state[master]) for p, master in self.pairs}
        for parameter, master in self.pairs if self.has_masters else ():
            states[parameter][MASTER_WEIGHT] = master.detach()
        return states


def of(model, optimizer):
    return snapshot(model, optimizer, gradients=False)


# ---------------------------------------------------------------------- exactness

#: Dtypes of weights, and options.
SECTIONS = [
    (torch.float32, BFLOAT16),
    (torch.bfloat16, MASTERS),
    (torch.float16, MASTERS),
    (torch.bfloat16, {**MASTERS, **BFLOAT16}),
]
#: The others take turns with one of these each.
IN_ALL_SECTIONS = ["AdamW fused", "Adam amsgrad fused", "RMSprop centered foreach", "a late state"]
IN_TURN = ["ASGD", "AdamW", "Adagrad", "NAdam", "SGD", "SGD momentum", "AdamW foreach"]
TRIED = [*product(IN_ALL_SECTIONS, SECTIONS), *in_turn(IN_TURN, SECTIONS)]
#: Only float32 states are rounded, and only half weights have masters.
WITHOUT_EFFECT = [
    *((dtype, BFLOAT16) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
    (torch.float32, MASTERS),
]


@pytest.mark.parametrize(
    ("name", "section", "overlap"),
    [
        *((*pair, overlap) for pair, overlap in in_turn(TRIED, EVERY_OVERLAP)),
        *(("AdamW", section, "commit") for section in WITHOUT_EFFECT),
    ],
)
def test_six_steps_of(name, section, overlap, disk, monkeypatch):
    """With weights that somebody changes between steps, clipping, and a checkpoint in between."""
    monkeypatch.setattr(inner_step, "CHUNK_ELEMENTS", 256)
    dtype, options = section
    reference, file = Reference(name, dtype, options), io.BytesIO()
    for first in (0, STEPS // 2):
        model = make_model(dtype)
        # Subgroups that are larger than a chunk.
        with offloading(disk, overlap, optimizer={**options, "subgroup_size": 1000}) as engine:
            optimizer = engine.attach(None, MAKE[name](model))
            if first:
                saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            for number in range(first, first + STEPS // 2):
                if number == 1:
                    for one in (reference.model, model):
                        one[0].weight.data.clamp_(-0.05, 0.05)
                for one, its in ((reference.model, reference), (model, optimizer)):
                    backward(one, number)
                    if number == 2 and overlap != "eager":
                        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                    its.step()
                assert_same_bits(of(model, optimizer), of(reference.model, reference))
            states = optimizer.state_dict()
            torch.save({"model": model.state_dict(), "optimizer": states}, file)
    plain = MAKE[name](model)
    plain.load_state_dict(states)  # it keeps the master weights that it does not know
    assert (MASTER_WEIGHT in plain.state_dict()["state"].get(0, {})) == reference.has_masters


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Adam amsgrad fused", "SGD momentum"])
def test_loading_casts_states_as_a_plain_optimizer_does(name, own, stored, disk):
    source = make_model(stored)
    giver = MAKE[name](source)
    backward(source, 0)
    giver.step()
    plain, model = make_model(own), make_model(own)
    expected = MAKE[name](plain)
    expected.load_state_dict(giver.state_dict())
    with offloading(disk) as engine:
        optimizer = engine.attach(None, MAKE[name](model))
        optimizer.load_state_dict(giver.state_dict())
        assert_same_bits(of(model, optimizer), of(plain, expected))
        for one, its in ((plain, expected), (model, optimizer)):
            backward(one, 1)
            its.step()
        assert_same_bits(of(model, optimizer), of(plain, expected))


# ---------------------------------------------------------------------- stochastic rounding
def _rounded(value, update, count=4096):
    stored = torch.empty(count, dtype=torch.bfloat16)
    copy_rounded(stored, torch.full((count,), value), torch.Generator().manual_seed(update))
    return stored


def test_stochastic_rounding_keeps_the_mean_and_values_of_bfloat16():
    value = 1.0 + 0.3 / 128  # three tenths of a step above 1
    stored = _rounded(value, 0)
    assert set(stored.tolist()) == {1.0, 1.0 + 1 / 128}
    assert abs((stored > 1).float().mean().item() - 0.3) < 0.04  # five standard deviations
    assert torch.equal(stored, _rounded(value, 0))
    assert not torch.equal(stored, _rounded(value, 1))
    for kept in (0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan, 2.0**-130):
        assert bits(_rounded(kept, 0)) == bits(torch.full((4096,), kept).to(torch.bfloat16))


def test_small_changes_add_up_only_with_stochastic_rounding(disk):
    """An average that decays by a thousandth a step, which is less than a step of bfloat16."""
    left = {}
    for stochastic in (False, True):
        parameter = nn.Parameter(torch.zeros(100, 100))
        options = {**BFLOAT16, "stochastic_rounding": stochastic, "subgroup_size": "auto"}
        state = torch.get_rng_state()
        with offloading(disk, optimizer=options) as engine:
            optimizer = engine.attach(None, SGD([parameter], 0.0, momentum=0.999))
            for number in range(100):
                optimizer.zero_grad()
                (parameter * (1.0 if number == 0 else 0.0)).sum().backward()
                optimizer.step()
            left[stochastic] = optimizer.state[parameter]["momentum_buffer"].mean().item()
        assert torch.equal(torch.get_rng_state(), state)
    assert left[False] == 1.0
    assert abs(left[True] - 0.999**99) < 0.01


def test_a_resumed_run_rounds_as_one_that_was_not_interrupted(disk):
    options = {**BFLOAT16, "stochastic_rounding": True, "subgroup_size": "auto"}

    def steps(optimizer, parameter, numbers):
        for number in numbers:
            optimizer.zero_grad()
            (parameter * torch.arange(9000.0) / (number + 7)).sum().backward()
            optimizer.step()

    def of(parameter, optimizer):
        state = optimizer.state[parameter]
        return {"weight": parameter.detach(), **{n: v for n, v in state.items() if n != "step"}}

    parameter = nn.Parameter(torch.zeros(9000))
    with offloading(disk, optimizer=options) as engine:
        optimizer = engine.attach(None, AdamW([parameter], 1e-2))
        steps(optimizer, parameter, range(3))
        saved = copy.deepcopy((parameter, optimizer.state_dict()))
        steps(optimizer, parameter, range(3, 6))
        expected = of(parameter, optimizer)
    parameter, states = saved
    with offloading(disk, optimizer=options) as engine:
        optimizer = engine.attach(None, AdamW([parameter], 1e-2))
        optimizer.load_state_dict(states)
        steps(optimizer, parameter, range(3, 6))
        assert_same_bits(of(parameter, optimizer), expected)
