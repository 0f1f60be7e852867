"""What version counters do not tell of: the same as without offload, or refused."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from offload_strategy import OffloadEngine, OffloadError
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from tests.optimizer.runs import EVERY_OVERLAP, OVERLAPS, make_layers
from tests.training import (
    assert_same_history,
    attached,
    same_with_and_without,
    settings,
    weights,
)


def _loss(model, step=0):
    return model(torch.full((2, 8), 1.0 + step)).pow(2).sum()


def _nothing():
    pass


def _trained(model, optimizer, *, before=_nothing, after=_nothing):
    """Weights after each of four steps, with calls before `step()` and after it."""
    found = []
    for step in range(4):
        _loss(model, step).backward()
        before()
        optimizer.step()
        after()
        optimizer.zero_grad()
        found.append(weights(model))
    return found


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_gradient_that_a_hook_keeps_may_be_changed_unseen(overlap, disk):
    def run(engine):
        model, kept = make_layers(4, 8), []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        optimizer = attached(engine, model, SGD(model.parameters(), 1e-3, momentum=0.9))

        def halve():  # as a reduction that the hook has begun
            while kept:
                values = kept.pop().detach().numpy()
                np.multiply(values, 0.5, out=values)

        return _trained(model, optimizer, before=halve)

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


class _TrustRatio(Optimizer):
    """The update of an element depends on the norm of its parameter, as in LAMB."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_warm_up_from_zero_hides_nothing_of_an_update(overlap, disk):
    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 256), nn.Linear(256, 64))
        plain = _TrustRatio(model.parameters())
        schedule = LambdaLR(plain, lambda step: step / 4)
        return _trained(model, attached(engine, model, plain), after=schedule.step)

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


def test_states_of_parameters_that_share_memory_stay_in_memory(disk, caplog):
    def make():
        model = make_layers(2, 8)
        model[1].weight = nn.Parameter(model[0].weight.data)
        return model, AdamW(model.parameters())

    plain, expected = make()
    model, optimizer = make()
    with OffloadEngine(settings(disk)) as engine:
        used = engine.attach(model, optimizer)
        assert not isinstance(used, OffloadedOptimizer)
        assert "share memory" in caplog.text
        assert_same_history(_trained(model, used), _trained(plain, expected))


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_states_that_were_permuted_are_written_back(overlap, disk):
    def run(engine):
        model = make_layers(2, 8)
        optimizer = attached(engine, model, AdamW(model.parameters()))

        def permute():
            state = optimizer.state[model[0].weight]
            state["exp_avg"].copy_(state["exp_avg"].flip(0))
            state["exp_avg_sq"] = state["exp_avg_sq"].roll(1, 0)

        return _trained(model, optimizer, after=permute)

    same_with_and_without(run, settings(disk, optimizer={"overlap": overlap}))


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_a_parameter_that_replaced_another_is_in_the_state_dict(overlap, disk):
    model = make_layers(2, 8)
    with OffloadEngine(settings(disk, optimizer={"overlap": overlap})) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters()))
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        old = model[0].weight
        model[0].weight = new = nn.Parameter(old.detach().clone())
        state = dict(optimizer.state[old])
        del optimizer.state[old]
        optimizer.param_groups[0]["params"][0] = new
        optimizer.state[new] = state
        _loss(model).backward()
        optimizer.step()
        assert sorted(optimizer.state_dict()["state"]) == [0, 1]


def test_within_an_eager_step_nothing_is_saved_and_no_weight_changed(disk):
    model = make_layers(2, 8)
    # States in host memory: an update that waits for its own runs in step(), as in plain PyTorch.
    with OffloadEngine(settings(disk, "1MiB", optimizer={"overlap": "eager"})) as engine:
        optimizer = engine.attach(model, AdamW(model.parameters()))
        _loss(model).backward()
        for _ in range(2):
            with pytest.raises(OffloadError, match="not those of any step"):
                optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.state_dict()["state"]
        _loss(model).backward()
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        with pytest.raises(OffloadError, match="before weights were changed"):
            optimizer.step()
