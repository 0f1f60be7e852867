"""The optimizer that the user gets back does what theirs did."""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from offload_strategy import ConfigError, OffloadEngine, OffloadError, StorageError
from offload_strategy.optimizer import OffloadedOptimizer
from offload_strategy.optimizer.updates import Updater
from offload_strategy.optimizer.user_class import kernel
from tests.optimizer.runs import (
    Run,
    compare,
    loss_of,
    make_net,
    offloading,
    snapshot,
)
from tests.training import assert_same_bits, bits

OVERLAPS = ["commit", "off"]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), 1e-2, fused=True)


def steps(run: Run, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        run.optimizer.zero_grad()
        run.backward(number)
        run.step()


def assert_same_state_dict(got: Any, expected: Any, where: str = "state_dict") -> None:
    """The same keys in the same order, and the same values, types and bits."""
    assert type(got) is type(expected), where
    if isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key, value in expected.items():
            assert_same_state_dict(got[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for index, value in enumerate(expected):
            assert_same_state_dict(got[index], value, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert bits(got) == bits(expected), where
        assert got.device == expected.device, where
        assert got.stride() == expected.stride(), where
        assert got.untyped_storage().nbytes() == expected.untyped_storage().nbytes(), where
    else:
        assert got == expected, where


# ---------------------------------------------------------------------- state dicts
MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": adamw,
    "Adam amsgrad": lambda m: Adam(m.parameters(), 1e-2, amsgrad=True),
    "SGD momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9),
    "SGD": lambda m: SGD(m.parameters(), 0.1),
    "named groups": lambda m: AdamW(
        [
            {"params": list(m.named_parameters())[:3], "lr": 0.1},
            {"params": list(m.named_parameters())[3:]},
        ],
        1e-2,
    ),
}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", MAKE)
def test_a_state_dict_is_the_plain_optimizers(name: str, overlap: str, disk: Path) -> None:
    plain = Run(MAKE[name])
    steps(plain, 3)
    plain.backward(3)
    with offloading(disk, overlap) as engine:
        run = Run(MAKE[name], engine)
        fresh = MAKE[name](make_net()).state_dict()
        assert_same_state_dict(run.optimizer.state_dict(), fresh)
        steps(run, 3)
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())
        run.backward(3)  # with an update under way, nothing of it is visible
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())
        plain.optimizer.step()
        run.optimizer.step()
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())


def test_a_state_dict_is_a_copy(disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
        saved = run.optimizer.state_dict()
        kept = copy.deepcopy(saved)
        for state in saved["state"].values():
            state["exp_avg"].zero_()
        assert_same_state_dict(run.optimizer.state_dict(), kept)
        kept_for_good = run.optimizer.state_dict()
        steps(run, 2, start=1)
    assert_same_state_dict(kept_for_good, kept)  # also after the engine is closed


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("pending", [False, True], ids=["between steps", "before a step"])
@pytest.mark.parametrize("through_a_file", [False, True], ids=["in memory", "through a file"])
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "named groups"])
def test_checkpoints_go_both_ways(
    name: str, overlap: str, pending: bool, through_a_file: bool, disk: Path
) -> None:
    """Plain, offloaded, and changing over in the middle: all the same."""

    def handed_over(run: Run, engine: Any) -> Run:
        state: Any = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        if through_a_file:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        else:
            state = copy.deepcopy(state)
        other = Run(MAKE[name], engine)
        if pending:  # what ran ahead must not survive the loading
            other.backward(77)
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.model.zero_grad()
        return other

    plain = Run(MAKE[name])
    steps(plain, 6)
    with offloading(disk, overlap) as engine:
        run = Run(MAKE[name])
        steps(run, 2)
        run = handed_over(run, engine)
        steps(run, 2, start=2)
        run = handed_over(run, None)
        steps(run, 2, start=4)
        assert_same_bits(run.history[-1], plain.history[-1])
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_loading_between_backward_and_step_counts(overlap: str, disk: Path) -> None:
    donor = Run(adamw)
    steps(donor, 3)
    saved = donor.optimizer.state_dict()

    def script(run: Run) -> None:
        steps(run, 2)
        run.optimizer.zero_grad()
        run.backward(2)
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        run.step()
        steps(run, 1, start=3)

    compare(script, adamw, disk, overlap)


def test_loading_a_state_dict_of_another_model_is_refused_and_changes_nothing(
    disk: Path,
) -> None:
    other = AdamW(nn.Linear(2, 2).parameters())
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 2)
        before = run.optimizer.state_dict()
        with pytest.raises(ValueError, match="doesn't match"):
            run.optimizer.load_state_dict(other.state_dict())
        assert_same_state_dict(run.optimizer.state_dict(), before)


def test_states_that_an_optimizer_has_already_are_taken_over(disk: Path) -> None:
    plain = Run(adamw)
    steps(plain, 4)
    half = Run(adamw)
    steps(half, 2)
    with offloading(disk) as engine:
        half.optimizer = engine.attach(None, half.optimizer)
        steps(half, 2, start=2)
        assert_same_bits(half.history[-1], plain.history[-1])


# ---------------------------------------------------------------------- optimizer.state
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_state_reads_like_a_dictionary(overlap: str, disk: Path) -> None:
    plain = Run(adamw)
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        assert len(run.optimizer.state) == 0
        assert not run.optimizer.state
        for each in (plain, run):
            steps(each, 2)
        named = dict(run.model.named_parameters())
        twins = dict(plain.model.named_parameters())
        assert len(run.optimizer.state) == len(plain.optimizer.state)
        for name, parameter in named.items():
            assert (parameter in run.optimizer.state) == (twins[name] in plain.optimizer.state)
        assert {id(p) for p in run.optimizer.state} == {
            id(named[name]) for name, twin in twins.items() if twin in plain.optimizer.state
        }
        assert run.optimizer.state[run.model.frozen.weight] == {}
        assert "anything" not in run.optimizer.state
        for parameter, state in run.optimizer.state.items():
            twin = next(twins[name] for name, own in named.items() if own is parameter)
            assert_same_state_dict(dict(state), dict(plain.optimizer.state[twin]))


@pytest.mark.parametrize("when", ["between steps", "before a step"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_state_may_be_assigned(overlap: str, when: str, disk: Path) -> None:
    def script(run: Run) -> None:
        steps(run, 2)
        run.optimizer.zero_grad()
        if when == "before a step":
            run.backward(2)
        parameter = run.model.first.weight
        state = dict(run.optimizer.state[parameter])
        state["exp_avg"] = torch.ones_like(parameter)
        run.optimizer.state[parameter] = state
        if when != "before a step":
            run.backward(2)
        run.step()
        steps(run, 1, start=3)

    compare(script, adamw, disk, overlap)


@pytest.mark.parametrize("when", ["between steps", "before a step"])
def test_a_state_may_be_deleted_and_begins_anew(when: str, disk: Path) -> None:
    def script(run: Run) -> None:
        steps(run, 2)
        run.optimizer.zero_grad()
        if when == "before a step":
            run.backward(2)
        del run.optimizer.state[run.model.first.weight]
        if when != "before a step":
            run.backward(2)
        run.step()

    compare(script, adamw, disk)


# ---------------------------------------------------------------------- schedulers
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=12),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("first", ["the optimizer", "the scheduler"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_steer_the_optimizer(name: str, first: str, disk: Path) -> None:
    def script(run: Run) -> None:
        inner: Any = AdamW(run.model.parameters(), 1e-2)
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
        compare(script, None, disk)


def test_a_scheduler_that_is_stepped_too_early_is_warned_of_as_ever(disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        scheduler = schedulers.StepLR(run.optimizer, 1)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


def test_a_scheduler_may_step_between_backward_and_step(disk: Path) -> None:
    def script(run: Run) -> None:
        scheduler = schedulers.ExponentialLR(run.optimizer, 0.5)
        run.backward(0)
        run.step()
        for number in range(1, 5):
            run.optimizer.zero_grad()
            run.backward(number)
            scheduler.step()
            run.step()

    compare(script, adamw, disk)


# ---------------------------------------------------------------------- several optimizers
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_two_optimizers_train_a_generator_and_a_discriminator(overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 1))
        both = nn.ModuleDict({"generator": generator, "critic": critic})
        for_generator = run.wrap(Adam(generator.parameters(), 1e-2, betas=(0.5, 0.9)))
        for_critic = run.wrap(SGD(critic.parameters(), 0.1, momentum=0.9))
        run.model = both  # type: ignore[assignment]
        for step in range(5):
            torch.manual_seed(10 + step)
            fake = generator(torch.randn(7, 4))
            for_critic.zero_grad()
            (critic(torch.randn(7, 6)).mean() - critic(fake.detach()).mean()).neg().backward()
            run.note(None, for_generator, for_critic)
            for_critic.step()
            run.note(None, for_generator, for_critic)
            for_generator.zero_grad()
            critic(fake).mean().neg().backward()  # gives the critic gradients as well
            run.note(None, for_generator, for_critic)
            for_generator.step()
            run.note(None, for_generator, for_critic)

    compare(script, None, disk, overlap)


# ---------------------------------------------------------------------- groups
@pytest.mark.parametrize("when", ["between steps", "before a step"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_group_may_be_added_while_training(overlap: str, when: str, disk: Path) -> None:
    def script(run: Run) -> None:
        model = run.model
        some = [model.first.weight, model.norm.weight, model.out.weight]
        chosen = {id(parameter) for parameter in some}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        run.optimizer = run.wrap(AdamW(some, 1e-2))
        for number in range(6):
            run.optimizer.zero_grad()
            model.zero_grad()
            if number == 3 and when == "between steps":
                run.optimizer.add_param_group({"params": rest, "lr": 0.1})
            run.backward(number, extra=True)
            if number == 3 and when != "between steps":
                run.optimizer.add_param_group({"params": rest, "lr": 0.1})
            run.step()

    compare(script, None, disk, overlap)


def test_groups_may_be_changed_by_hand(disk: Path) -> None:
    """Unusual, but plain: the optimizer updates what its groups name at the time of the step."""

    def script(run: Run) -> None:
        steps(run, 2)
        group = run.optimizer.param_groups[0]
        replaced = run.model.first.weight
        fresh = nn.Parameter(replaced.detach() * 0.5)
        run.model.first.weight = fresh
        group["params"] = [fresh if p is replaced else p for p in group["params"]]
        steps(run, 2, start=2)
        group["params"] = [p for p in group["params"] if p is not run.model.scale]
        for number in range(4, 6):
            run.optimizer.zero_grad()
            run.backward(number)
            run.optimizer.step()
            run.history.append(snapshot(run.model))  # who is gone has a state only in plain torch

    compare(script, adamw, disk)


def test_groups_defaults_and_attributes_are_the_inner_ones(disk: Path) -> None:
    with offloading(disk) as engine:
        inner: Any = adamw(make_net())
        inner.remark = "mine"
        wrapped: Any = engine.attach(None, inner)
        assert isinstance(wrapped, Optimizer)
        assert isinstance(wrapped, OffloadedOptimizer)
        assert wrapped.param_groups is inner.param_groups
        assert wrapped.defaults is inner.defaults
        assert wrapped.remark == "mine"
        assert "AdamW" in repr(wrapped)
        # GradScaler must unscale by itself: see SEAMS of frameworks.
        assert not hasattr(wrapped, "_step_supports_amp_scaling")
        with pytest.raises(AttributeError):
            _ = wrapped.nothing_of_the_kind


# ---------------------------------------------------------------------- hooks
def test_hooks_on_steps_are_called_as_for_the_plain_optimizer(disk: Path) -> None:
    def script(run: Run) -> list[Any]:
        calls: list[Any] = []

        def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
            assert args[0] is optimizer is run.optimizer
            calls.append(("pre", type(args), len(args), kwargs, run.model.scale.item()))

        def post(optimizer: Any, args: Any, kwargs: Any) -> None:
            momentum = optimizer.state[run.model.scale]["exp_avg"].item()
            calls.append(("post", type(args), len(args), kwargs, momentum))

        handles = [
            run.optimizer.register_step_pre_hook(pre),
            run.optimizer.register_step_post_hook(post),
            register_optimizer_step_pre_hook(pre),
            register_optimizer_step_post_hook(post),
        ]
        for number in range(3):
            run.optimizer.zero_grad()
            run.backward(number)
            run.optimizer.step()
        run.optimizer.step(lambda: None)
        for handle in handles:
            handle.remove()
        run.optimizer.step()
        return calls

    expected = script(Run(adamw))
    with offloading(disk) as engine:
        assert script(Run(adamw, engine)) == expected
    assert len(expected) == 16


def test_hooks_on_state_dicts_are_called(disk: Path) -> None:
    def script(run: Run) -> list[str]:
        calls: list[str] = []
        optimizer = run.optimizer
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
        optimizer.register_state_dict_post_hook(lambda o, state: calls.append("post"))
        optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
        steps(run, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        return calls

    expected = script(Run(adamw))
    with offloading(disk) as engine:
        assert script(Run(adamw, engine)) == expected == ["pre", "post", "load", "loaded"]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_cannot_be_copied_and_says_what_to_do(copied: Callable[[Any], Any], disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        with pytest.raises(TypeError, match=r"state_dict\(\) instead"):
            copied(run.optimizer)


# ---------------------------------------------------------------------- when things go wrong
def test_after_closing_every_use_says_so(disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
    optimizer = run.optimizer
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    ):
        with pytest.raises(OffloadError, match="closed"):
            use()
    optimizer.zero_grad()
    run.backward(5)  # nothing listens any more
    assert all(not p._post_accumulate_grad_hooks for p in run.model.parameters())


class Interrupted(BaseException):
    pass


def whole_step(run: Run, number: int) -> None:
    run.backward(number)
    run.optimizer.step()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
@pytest.mark.parametrize("call", [0, 1])
def test_an_update_that_is_interrupted_loses_no_state(
    overlap: str, error: type[BaseException], call: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint can be written after Ctrl-C, and training can go on."""
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        steps(run, 2)
        before = run.optimizer.state_dict()
        calls = 0
        real = kernel.run_update

        def interrupted(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise error("stop")
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr("offload_strategy.optimizer.updates.run_update", interrupted)
            run.optimizer.zero_grad()
            with pytest.raises(error, match="stop"):
                whole_step(run, 2)
        after = run.optimizer.state_dict()
        assert list(after["state"]) == list(before["state"])
        changed = [
            key
            for key, state in after["state"].items()
            if bits(state["exp_avg"]) != bits(before["state"][key]["exp_avg"])
        ]
        assert (len(changed) > 0) == (overlap == "off" and call == 1)
        run.optimizer.zero_grad()
        steps(run, 2, start=3)


def test_a_disk_that_breaks_loses_no_state(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Run(adamw)
    steps(plain, 2)
    with offloading(disk, "off") as engine:
        run = Run(adamw, engine)
        steps(run, 1)

        def broken(*args: Any) -> int:
            raise OSError(5, "Input/output error")

        engine._resources.heap.wait_for_writes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", broken)
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


def test_too_small_a_tier_is_refused_before_training(disk: Path) -> None:
    model = nn.Linear(1000, 100)
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "800KiB"}]
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "off"}}) as engine:
        assert engine.attach(model, AdamW(model.parameters())) is not None
    with OffloadEngine({"tiers": tiers, "optimizer": {"overlap": "commit"}}) as engine:
        with pytest.raises(ConfigError) as refused:
            engine.attach(model, AdamW(model.parameters()))
        for part in ("1.9 MiB", "782 KiB of states", "800 KiB", "overlap to off"):
            assert part in str(refused.value)
        # Refused as a whole: the same parameters may be tried again with less.
        assert engine.attach(model, SGD(model.parameters(), 0.1)) is not None


# ---------------------------------------------------------------------- running ahead
def _spy(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts = {"speculate": 0, "commit": 0, "drop": 0, "update_in_place": 0}
    for name in counts:
        real = getattr(Updater, name)

        def counted(self: Updater, *args: Any, _name: str = name, _real: Any = real) -> Any:
            counts[_name] += 1
            return _real(self, *args)

        monkeypatch.setattr(Updater, name, counted)
    return counts


class Chain(nn.Module):
    """Layers of a size that each make a subgroup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def forward(self) -> torch.Tensor:
        return self.layers(torch.ones(2, 8)).pow(2).sum()


def test_updates_run_during_backward_and_are_committed_at_the_step(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _spy(monkeypatch)
    # In host memory, so that no update ever waits for its states.
    with offloading(disk, host="1MiB") as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for step in range(1, 4):
            optimizer.zero_grad()
            before = snapshot(model)
            model().backward()
            assert counts["speculate"] == 4 * step
            after = snapshot(model)
            assert_same_bits({k: after[k] for k in before}, before)
            assert counts["commit"] == 4 * (step - 1)
            optimizer.step()
            assert counts["commit"] == 4 * step
        assert counts["drop"] == counts["update_in_place"] == 0


def test_running_ahead_stops_while_gradients_are_changed_and_comes_back(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _spy(monkeypatch)
    with offloading(disk) as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))

        def step(clip: bool) -> int:
            before = counts["speculate"]
            optimizer.zero_grad()
            model().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            return counts["speculate"] - before

        assert step(clip=True) > 0
        assert [step(clip=True) for _ in range(4)] == [0] * 4
        assert step(clip=False) == 0
        assert any(step(clip=False) for _ in range(16))
        figures = engine.metrics()
        assert figures["offload/optimizer/redone_steps"] == 1
        assert figures["offload/optimizer/speculated_steps"] >= 2


def test_hints_keep_updates_back_until_the_last_micro_batch(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _spy(monkeypatch)
    with offloading(disk) as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            for index in range(3):
                engine.microbatch(index, last=index == 2)
                before = counts["speculate"]
                model().backward()
                assert (counts["speculate"] > before) == (index == 2)
            optimizer.step()
        assert counts["drop"] == 0


def test_nothing_runs_ahead_with_overlap_off(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = _spy(monkeypatch)
    with offloading(disk, "off") as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert counts == {"speculate": 0, "commit": 0, "drop": 0, "update_in_place": 8}


def test_weights_are_written_into_their_own_storage(disk: Path) -> None:
    """Aliases of the weights, like those of an average or of a tied layer, see the update."""
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        aliases = {name: p.detach() for name, p in run.model.named_parameters()}
        addresses = {name: p.data_ptr() for name, p in run.model.named_parameters()}
        before = {name: alias.clone() for name, alias in aliases.items()}
        steps(run, 3)
        for name, parameter in run.model.named_parameters():
            assert parameter.data_ptr() == addresses[name]
            assert torch.equal(aliases[name], parameter)
        assert not torch.equal(aliases["first.weight"], before["first.weight"])


def test_states_are_on_the_disk_between_steps(disk: Path) -> None:
    with offloading(disk) as engine:
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        engine._resources.heap.wait_for_writes()
        metrics = engine.metrics()
        states = 2 * sum(p.numel() * 4 for p in model.parameters())
        assert states <= metrics["offload/tier/nvme/used_bytes"] <= states + 4 * 4096
        assert engine._resources.pool.usage().lent_bytes == 0
        assert metrics["offload/optimizer/written_bytes"] > 0
        assert not optimizer.inner.state


def test_the_loss_of_a_closure_is_returned(disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        loss = run.optimizer.step(lambda: loss_of(run.model, 0))
        assert bits(loss) == bits(loss_of(make_net(), 0))


@pytest.mark.parametrize("overlap", ["commit", "off", "eager"])
def test_what_is_in_host_memory_stays_there(overlap: str, disk: Path) -> None:
    """Half of the states never touch the disk, in whatever order updates and commits come."""
    with offloading(disk, overlap, host="1KiB") as engine:  # two layers of four
        model = Chain()
        optimizer = engine.attach(None, AdamW(model.parameters()))
        (host,) = engine._resources.host_tiers.values()
        written = []
        for _ in range(5):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            engine._resources.heap.wait_for_writes()
            written.append(engine.metrics()["offload/optimizer/written_bytes"])
            assert host.used_bytes == 2 * 2 * 64 * 4
        per_step = {later - earlier for earlier, later in pairwise(written)}
        assert per_step == {2 * 2 * 64 * 4}
