"""The offloaded optimizer behaves like the one that it wraps, and loses no state in failures."""

import copy
import errno
import gc
import inspect
import pickle
import warnings
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as schedulers
from torch.optim import optimizer as all_optimizers

from offload_strategy import ConfigError, OffloadEngine, OffloadError, StorageError
from offload_strategy.optimizer import subgroup_update
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.optimizer.states.precision import MASTER_WEIGHT
from offload_strategy.optimizer.user_class import inner_step
from tests.optimizer.runs import (
    Run,
    adamw,
    compare,
    make_layers,
    make_net,
    offloading,
    snapshot,
    steps,
)
from tests.training import assert_same_bits, bits, break_disk, in_turn, on_disk, weights

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=12),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize(
    ("name", "first", "overlap"),
    in_turn(SCHEDULERS, ["the optimizer", "the scheduler"], ["commit", "eager"]),
)
def test_schedulers_steer_the_optimizer(name, first, overlap, disk):
    def script(run):
        inner = AdamW(run.model.parameters(), 1e-2)
        if first == "the scheduler":
            scheduler = SCHEDULERS[name](inner)
            run.optimizer = run.wrap(inner)
        else:
            run.optimizer = run.wrap(inner)
            scheduler = SCHEDULERS[name](run.optimizer)
        for number in range(6):
            run.optimizer.zero_grad()
            run.backward(number)
            run.step()
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
            run.note(torch.tensor([group["lr"] for group in run.optimizer.param_groups]))

    with warnings.catch_warnings():
        # Among others: "lr_scheduler.step() before optimizer.step()".
        warnings.filterwarnings("error", ".*optimizer.step.*")
        compare(script, None, disk, overlap)


def test_a_scheduler_that_is_stepped_too_early_warns_like_the_plain_optimizer(disk):
    with offloading(disk) as engine:
        scheduler = schedulers.StepLR(Run(adamw, engine).optimizer, 1)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


@pytest.mark.parametrize(
    ("when", "overlap"),
    [("between steps", "commit"), ("before a step", "commit"), ("between steps", "off")],
)
def test_groups_may_be_added_and_changed_by_hand(when, overlap, disk):
    """Plain, if unusual: the optimizer updates what its groups name at the time of the step."""

    def script(run):
        model = run.model
        some = [model.first.weight, model.norm.weight, model.out.weight]
        rest = [p for p in model.parameters() if not any(p is one for one in some)]
        run.optimizer = run.wrap(AdamW(some, 1e-2))
        for number in range(9):
            model.zero_grad()
            if when == "before a step":
                run.backward(number, extra=True)
            if number == 3:
                run.optimizer.add_param_group({"params": rest, "lr": 0.1})
            group = run.optimizer.param_groups[0]
            if number == 1:
                group["betas"] = list(group["betas"])
            if number == 2:
                group["betas"][0] = 0.5
            if number == 5:
                model.first.weight = nn.Parameter(model.first.weight.detach() * 0.5)
                group["params"][0] = model.first.weight
            if number == 7:
                del group["params"][1]
            if when == "between steps":
                run.backward(number, extra=True)
            run.optimizer.step()
            run.history.append(snapshot(model))  # who is gone has a state only in plain torch

    compare(script, None, disk, overlap)


GROUP_EDITS = {
    "deleted": lambda groups: groups.pop(0),
    "swapped": lambda groups: groups.reverse(),
    "without a parameter": lambda groups: groups[0]["params"].pop(0),
}


@pytest.mark.parametrize(
    ("when", "overlap"),
    [("between steps", "commit"), ("between steps", "eager"), ("before a step", "commit")],
)
@pytest.mark.parametrize("name", GROUP_EDITS)
def test_groups_that_are_edited_in_place_are_planned_again(name, when, overlap, disk):
    def script(run):
        run.model = make_layers(4, 8)
        groups = [
            {"params": [run.model[i].weight for i in (j, j + 1)], "lr": 0.1 / (j + 1)}
            for j in (0, 2)
        ]
        run.optimizer = run.wrap(AdamW(groups))
        for number in range(5):
            if (number, when) == (2, "between steps"):
                GROUP_EDITS[name](run.optimizer.param_groups)
            run.model.zero_grad()
            run.model(torch.full((2, 8), number / 2 - 0.4)).pow(2).sum().backward()
            if (number, when) == (2, "before a step"):
                GROUP_EDITS[name](run.optimizer.param_groups)
            run.optimizer.step()
            run.history.append(snapshot(run.model, gradients=overlap == "commit"))

    compare(script, None, disk, overlap)


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_the_state_of_a_parameter_that_leaves_its_group_is_there_when_it_comes_back(overlap, disk):
    def script(run):
        for number in range(6):
            group = run.optimizer.param_groups[0]["params"]
            if number == 2:
                gone = group.pop(0)
            if number == 4:
                group.append(gone)
            run.model.zero_grad()
            run.backward(number)
            run.optimizer.step()
            run.history.append(snapshot(run.model, gradients=False))

    compare(script, adamw, disk, overlap)


@pytest.mark.parametrize("overlap", ["commit", "eager", "off"])
def test_a_compiled_step_is_refused_and_a_compiled_backward_updates_as_ever(overlap, disk):
    """A compiled update of a subgroup rounds neither like the optimizer nor like a compiled one."""

    def script(run):
        backward = torch.compile(run.backward, backend="eager")
        for number in range(3):
            run.optimizer.zero_grad()
            backward(number)
            run.step()

    compare(script, adamw, disk, overlap)
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine, overlap == "eager")
        steps(run, 1)
        run.optimizer.zero_grad()
        run.backward(1)
        before = weights(run.model)
        with pytest.raises(OffloadError, match=r"torch\.compile compiles.*call step\(\) outside"):
            torch.compile(run.optimizer.step, backend="eager")()
        assert_same_bits(weights(run.model), before)
        run.optimizer.step()


class KeepsParameters(list):
    """A hook as averages of weights have: an update of a subgroup does not run hooks."""

    def __call__(self, *_): ...


def test_hooks_are_called_as_for_the_plain_optimizer(disk):
    def script(run):
        calls = []
        optimizer = run.optimizer

        def pre(its, args, kwargs):
            assert args[0] is its is optimizer
            calls.append(("pre", type(args), len(args), kwargs, run.model.scale.item()))

        def post(its, args, kwargs):
            momentum = its.state[run.model.scale]["exp_avg"].item()
            calls.append(("post", type(args), len(args), kwargs, momentum))

        handles = [
            optimizer.register_step_pre_hook(pre),
            optimizer.register_step_post_hook(post),
            all_optimizers.register_optimizer_step_pre_hook(pre),
            all_optimizers.register_optimizer_step_post_hook(post),
        ]
        steps(run, 3)
        optimizer.step(lambda: None)
        for handle in handles:
            handle.remove()
        optimizer.step()
        for action in ("state_dict", "load_state_dict"):
            for moment in ("pre", "post"):
                register = getattr(optimizer, f"register_{action}_{moment}_hook")
                register(lambda *_, call=(action, moment): calls.append(call))
        optimizer.load_state_dict(optimizer.state_dict())
        return calls

    def make(model):
        optimizer = adamw(model)
        optimizer.register_step_post_hook(KeepsParameters(model.parameters()))
        return optimizer

    expected = script(Run(make))
    with offloading(disk) as engine:
        assert script(Run(make, engine)) == expected
    assert len(expected) == 20


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_cannot_be_copied_and_says_what_to_do(copied, disk):
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        with pytest.raises(TypeError, match=r"state_dict\(\) instead"):
            copied(run.optimizer)


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "deleted"])
def test_the_inner_one_does_not_step_by_itself(overlap, kept, disk):
    model = make_net()
    inner = adamw(model)
    with offloading(disk, overlap) as engine:
        wrapped = engine.attach(model, inner)
        if not kept:
            del wrapped
            gc.collect()
        before = weights(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(OffloadError, match="Train with the optimizer that attach returned"):
            inner.step()
        assert_same_bits(weights(model), before)
    inner.step()  # nobody has its states any more
    assert all(not torch.equal(now, before[name]) for name, now in weights(model).items())


class Counting(torch.optim.SGD):
    """Has a method, a property and a class attribute of its own, and keeps what is set."""

    kind = "counting"

    def __new__(cls, parameters, *, label):
        return super().__new__(cls)

    def __init__(self, parameters, *, label):
        super().__init__(parameters, 0.1, fused=True)
        self.label, self.counted = label, 0

    def count(self):
        self.counted += 1
        return self.counted

    @property
    def title(self):
        return self.label.upper()


class Final(torch.optim.SGD):
    """Has no subclasses."""

    def __init_subclass__(cls):
        raise TypeError("final")


def test_it_is_an_instance_of_the_users_class_with_what_that_has(disk):
    net = make_net()
    with offloading(disk) as engine:
        inner = Counting(net.parameters(), label="mine")
        optimizer = engine.attach(net, inner)
        assert isinstance(optimizer, Counting)
        assert isinstance(optimizer, OffloadedOptimizer)
        assert not isinstance(optimizer, AdamW)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.defaults is inner.defaults
        assert "Counting" in repr(optimizer)
        # GradScaler must unscale by itself: see `_HIDDEN`.
        assert inner._step_supports_amp_scaling
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        with pytest.raises(AttributeError):
            _ = optimizer.nothing_of_the_kind
        assert (optimizer.kind, optimizer.title, optimizer.count()) == ("counting", "MINE", 1)
        optimizer.label = "ours"
        assert (inner.label, inner.counted) == ("ours", 1)
        # One whose class has no subclasses is wrapped all the same.
        assert type(engine.attach(None, Final(make_net().parameters(), 0.1))) is OffloadedOptimizer


@pytest.mark.parametrize("kind", [AdamW, Final])
@pytest.mark.parametrize("name", ["param_groups", "defaults", "state"])
def test_frameworks_find_what_they_look_up_statically(kind, name, disk):
    """As `isinstance` with a runtime protocol does, which Lightning has."""
    net = make_net()
    with offloading(disk) as engine:
        optimizer = engine.attach(net, kind(net.parameters(), 0.1))
        assert isinstance(inspect.getattr_static(type(optimizer), name), property)


# ---------------------------------------------------------------------- when things go wrong
@contextmanager
def _update_fails(monkeypatch, call, error):
    """Have one of the calls of the user's class fail, counted from 0."""
    calls, real = count(), inner_step.run_update

    def failing(*args):
        if next(calls) == call:
            raise error
        real(*args)

    with monkeypatch.context() as patch:
        functions = SimpleNamespace(**vars(inner_step) | {"run_update": failing})
        patch.setattr(subgroup_update, "inner_step", functions)
        with pytest.raises(type(error), match=str(error)):
            yield


@pytest.mark.parametrize("overlap", ["commit", "off"])
@pytest.mark.parametrize("call", [0, 1])
def test_an_update_that_is_interrupted_loses_no_state(overlap, call, disk, monkeypatch):
    """A checkpoint can be written after Ctrl-C, and training can go on."""
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        steps(run, 2)
        before = run.optimizer.state_dict()
        with _update_fails(monkeypatch, call, KeyboardInterrupt("stop")):
            run.optimizer.zero_grad()
            run.backward(2)
            run.optimizer.step()
        after = run.optimizer.state_dict()
        assert list(after["state"]) == list(before["state"])
        then, now = (
            [bits(s["exp_avg"]) for s in each["state"].values()] for each in (before, after)
        )
        assert (now != then) == (overlap == "off" and call == 1)
        run.optimizer.zero_grad()
        steps(run, 2, start=3)


@pytest.mark.parametrize("masters", [True, False])
def test_an_update_that_fails_between_chunks_loses_no_state(masters, disk, monkeypatch):
    monkeypatch.setattr(inner_step, "CHUNK_ELEMENTS", 512)
    parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16 if masters else torch.float32))
    section = {"master_weights": True} if masters else {"state_dtype": "bfloat16"}

    def step():
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    with offloading(disk, "off", optimizer={**section, "subgroup_size": 10_000}) as engine:
        optimizer = engine.attach(None, AdamW([parameter], 1e-2))
        for _ in range(2):
            step()
        before = optimizer.state[parameter]
        with _update_fails(monkeypatch, 1, LookupError("refused")):
            step()
        kept = optimizer.state[parameter]
        assert kept.keys() == before.keys()
        # The first chunk is updated, the others are as they were.
        for name in ("exp_avg", MASTER_WEIGHT) if masters else ("exp_avg",):
            assert not torch.equal(kept[name][:8], before[name][:8])
            assert torch.equal(kept[name][8:], before[name][8:])
        assert kept["step"] == before["step"]
        step()
        assert optimizer.state[parameter]["step"] == before["step"] + 1
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_a_disk_that_breaks_loses_no_state(disk, monkeypatch):
    plain = Run(adamw)
    steps(plain, 2)
    with offloading(disk, "off") as engine:
        run = Run(adamw, engine)
        steps(run, 1)

        on_disk(engine)
        with monkeypatch.context() as patch:
            break_disk(patch, "pwritev", errno.EIO)
            run.optimizer.zero_grad()
            run.backward(1)
            # The write fails some time after it was asked for.
            with pytest.raises(StorageError, match=r"could not write .* of optimizer"):
                all(run.optimizer.step() is None for _ in range(20))
        # Loud from now on, but everything can still be saved.
        with pytest.raises(StorageError):
            run.optimizer.step()
        saved = run.optimizer.state_dict()
        assert len(saved["state"]) == len(plain.optimizer.state_dict()["state"])
        for key, state in plain.optimizer.state_dict()["state"].items():
            assert saved["state"][key].keys() == state.keys()


def test_too_small_a_tier_is_refused_before_training(disk):
    model = nn.Linear(1000, 100)
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "800KiB"}]
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "off"}}) as engine:
        assert engine.attach(model, AdamW(model.parameters())) is not None
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "commit"}}) as engine:
        with pytest.raises(ConfigError) as refused:
            engine.attach(model, AdamW(model.parameters()))
        for part in ("1.9 MiB", "782.5 KiB of states", "800 KiB", "overlap to off"):
            assert part in str(refused.value)
        # Refused as a whole: the same parameters may be tried again with less.
        assert engine.attach(model, SGD(model.parameters(), 0.1)) is not None
