"""Blocks that a plan has computed again: the same to the last bit, and only where they may be."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from offload_strategy.activations import planned_budget as planned
from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes
from offload_strategy.plan_runtime.plan_file import save_plan
from offload_strategy.plan_runtime.profile import PathRates, Profile, TensorLife
from offload_strategy.plan_runtime.recompute_mix import RecomputeMix, choose_mix, with_recomputed
from tests.activations.zoo import ZOO, Batch, batch, build
from tests.activations.zoo.training import SCHEDULES, train
from tests.training import (
    Numbers,
    assert_same_bits,
    assert_same_history,
    gradients,
    in_turn,
    settings,
)

STEPS = 8
TRANSFORMERS = {
    "GPT-2", "Llama", "Qwen2", "Mixtral", "BERT", "T5", "Whisper", "ViT", "CLIP",
}  # fmt: skip


@pytest.fixture
def all_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every block that may be is computed again; their names."""
    chosen: list[str] = []

    def choose(profile: Profile, limit: int) -> RecomputeMix:
        mix = choose_mix(profile, limit)
        names = tuple(block.name for block in profile.blocks)
        chosen.extend(names)
        return RecomputeMix(names, with_recomputed(profile, names), mix.plan, mix.replay)

    monkeypatch.setattr(planned, "choose_mix", choose)
    return chosen


def limited(disk: Path, recompute: str | bool = "auto", **planning: Any) -> dict[str, Any]:
    """A config with a limit that nothing exceeds."""
    config = settings(disk, optimizer={"enabled": False})
    config["activations"] = {"min_size": 1}
    config["planning"] = {"device_memory": "auto", "recompute": recompute, **planning}
    return config


def without_caches(model: Any) -> Any:
    """A model of Transformers that keeps no keys for a next token, which there is none of."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return model


def history(kind: str, engine: OffloadEngine | None, schedule: str) -> list[Numbers]:
    pytest.importorskip("transformers")

    def batch_of(number: int) -> Batch:
        return batch(kind, number)

    model = without_caches(build(kind))
    hints: dict[str, Any] = {}
    if engine is not None:
        engine.attach(model)
        hints["hint"] = lambda index, last: engine.microbatch(index, last=last)
    return train(model, batch_of, SCHEDULES[schedule], steps=STEPS, **hints)


# ---------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("kind", "recompute", "schedule"),
    in_turn(ZOO, ["auto", True], ["accumulation 1", "accumulation 1", "three forwards first"]),
)
def test_training_is_the_same(
    kind: str, recompute: str | bool, schedule: str, disk: Path, all_again: list[str]
) -> None:
    expected = history(kind, None, schedule)
    with OffloadEngine(limited(disk, recompute)) as engine:
        got = history(kind, engine, schedule)
        blocks = engine.metrics()["offload/activations/plan_recomputed_blocks"]
        assert blocks == len(set(all_again))
        # A schedule that mixes passes has none whose backward is over before the next begins.
        if kind in TRANSFORMERS and schedule == "accumulation 1":
            assert blocks >= 2
        if kind == "ResNet":
            assert not blocks, "its running averages would be taken twice"
    assert_same_history(got, expected)


class Stack(nn.Module):
    """Blocks of torch's own modules."""

    def __init__(self, *extra: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1),
                *(one(64) for one in extra),
            )
            for _ in range(3)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.pow(2).mean()


def passes(model: nn.Module, engine: OffloadEngine | None, count: int = STEPS) -> list[Numbers]:
    if engine is not None:
        engine.attach(model)
    found = []
    for number in range(count):
        torch.manual_seed(number)
        model.zero_grad()
        loss = model(torch.randn(32, 64))
        loss.backward()
        found.append({"loss": loss.detach().clone(), **gradients(model)})
        del loss
    return found


def stack(*extra: type[nn.Module]) -> Stack:
    torch.manual_seed(0)
    return Stack(*extra)


NAMES = [f"blocks.{number}" for number in range(3)]


def test_blocks_of_torchs_own_modules_are_computed_again(disk: Path, all_again: list[str]) -> None:
    expected = passes(stack(), None)
    model = stack()
    with OffloadEngine(limited(disk)) as engine:
        assert_same_history(passes(model, engine), expected)
        assert sorted(set(all_again)) == NAMES
        saved = engine.metrics()["offload/activations/step_saved_bytes"]
        # Of each block its input, and the loss's own; nothing of what lies within.
        assert saved == 4 * 32 * 64 * 4
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin.blocks[0]._compiled_call_impl is None
            x = torch.randn(8, 64)
            assert torch.equal(twin.eval()(x), model.eval()(x))
        assert set(model.state_dict()) == set(stack().state_dict())
        model.train()
    assert model.blocks[0]._compiled_call_impl is None
    assert_same_history(passes(model, None), expected)


class Counting(nn.Module):
    """Changes a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Own(nn.Module):
    """Not torch's, and harmless."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


@pytest.mark.parametrize(
    ("extra", "recompute", "again"),
    [
        (Own, "auto", 0),
        (Own, True, 3),
        (Counting, "auto", 0),
        (Counting, True, 0),
        (nn.BatchNorm1d, True, 0),
        (nn.LayerNorm, "auto", 3),
        (nn.LayerNorm, False, 0),
    ],
)
def test_what_may_not_run_twice_does_not(
    extra: type[nn.Module], recompute: str | bool, again: int, disk: Path, all_again: list[str]
) -> None:
    plain, model = stack(extra), stack(extra)
    expected = passes(plain, None)
    with OffloadEngine(limited(disk, recompute)) as engine:
        assert_same_history(passes(model, engine), expected)
        assert engine.metrics()["offload/activations/plan_recomputed_blocks"] == again
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))


class Listed(nn.Module):
    """Hands its blocks an object that they could change."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, seen: Any) -> torch.Tensor:
            seen.append(x)
            return self.linear(x).tanh()

    class Seen(list[Any]):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Listed.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = Listed.Seen()
        for block in self.blocks:
            x = block(x, seen)
        return x.sum() + len(seen)


class Asking(nn.Module):
    """Computes something else if it is given the same tensor twice, as torch's attention does."""

    class Block(nn.Linear):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x is other else super().forward(x + other)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Asking.Block(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, x).tanh()
        return x.sum()


@pytest.mark.parametrize(
    "make", [Listed, Asking, lambda: torch.compile(stack(), backend="eager")],
    ids=["given an object", "given a tensor twice", "compiled"],
)  # fmt: skip
def test_blocks_are_left_alone(
    make: Callable[[], nn.Module], disk: Path, all_again: list[str]
) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    expected = passes(made(), None)
    with OffloadEngine(limited(disk, True)) as engine:
        assert_same_history(passes(made(), engine), expected)
        assert not all_again


def test_hooks_of_others_run_as_often_as_ever(disk: Path, all_again: list[str]) -> None:
    model = stack()
    calls: list[str] = []
    model.blocks[1][0].register_forward_hook(lambda *_: calls.append("hook"))
    with OffloadEngine(limited(disk, True)) as engine:
        passes(model, engine)
        assert sorted(set(all_again)) == [NAMES[0], NAMES[2]]
    assert len(calls) == STEPS


def test_a_model_of_transformers_is_as_before_when_the_engine_closes(
    disk: Path, all_again: list[str]
) -> None:
    pytest.importorskip("transformers")
    model = without_caches(build("GPT-2"))
    layer = model.transformer.h[0]
    with OffloadEngine(limited(disk)) as engine:
        engine.attach(model)
        for number in range(STEPS):
            model(**batch("GPT-2", number)).loss.backward()
        assert layer.gradient_checkpointing
    assert not layer.gradient_checkpointing
    assert "_gradient_checkpointing_func" not in vars(layer)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("recompute", ["auto", True])
def test_layers_that_are_given_a_cache_are_left_alone_unless_the_user_says_so(
    recompute: str | bool, disk: Path, all_again: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    model = build("Llama")
    with (
        caplog.at_level(logging.INFO),
        OffloadEngine(limited(disk, recompute)) as engine,
    ):
        engine.attach(model)
        for number in range(STEPS):
            model(**batch("Llama", number)).loss.backward()
        again = engine.metrics()["offload/activations/plan_recomputed_blocks"]
    assert again == (2 if recompute is True else 0)
    assert ("planning.recompute" in caplog.text) is (recompute == "auto")


def test_a_model_that_is_detached_is_as_before(disk: Path, all_again: list[str]) -> None:
    model, other = stack(), stack()
    with OffloadEngine(limited(disk)) as engine:
        passes(model, engine)
        assert engine.metrics()["offload/activations/plan_recomputed_blocks"] == 3
        engine.attach(other)
        engine.detach_model(other)
        engine.detach_model(model)
        for each in (model, other):
            assert all(block._compiled_call_impl is None for block in each.blocks)
            assert not any(block._forward_hooks for block in each.blocks)
        passes(model, None)


def test_checkpointing_of_the_users_own_is_left_alone(disk: Path, all_again: list[str]) -> None:
    pytest.importorskip("transformers")
    model = build("GPT-2", reentrant=False)
    with OffloadEngine(limited(disk)) as engine:
        engine.attach(model)
        for number in range(STEPS):
            model(**batch("GPT-2", number)).loss.backward()
        assert not all_again
    assert model.transformer.h[0].gradient_checkpointing


# ---------------------------------------------------------------- decisions
def test_further_blocks_are_chosen_once_more_is_known(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, none twice, and then no more: nobody looks at the others for ever."""
    chosen: list[str] = []

    def choose_one(profile: Profile, limit: int) -> RecomputeMix:
        mix = choose_mix(profile, limit)
        names = tuple(block.name for block in profile.blocks)[:1]
        chosen.extend(names)
        return RecomputeMix(names, with_recomputed(profile, names), mix.plan, mix.replay)

    monkeypatch.setattr(planned, "choose_mix", choose_one)
    kind = "BERT"
    pytest.importorskip("transformers")
    model = without_caches(build(kind))
    layers = copy.deepcopy(model.bert.encoder.layer[0])
    model.bert.encoder.layer.extend(copy.deepcopy(layers) for _ in range(4))
    plain = copy.deepcopy(model)

    def batch_of(number: int) -> Batch:
        return batch(kind, number)

    expected = train(plain, batch_of, SCHEDULES["accumulation 1"], steps=20)
    with OffloadEngine(limited(disk)) as engine:
        engine.attach(model)
        got = train(model, batch_of, SCHEDULES["accumulation 1"], steps=20)
        figures = engine.metrics()
        hooked = [layer for layer in model.bert.encoder.layer if layer._forward_hooks]
    assert_same_history(got, expected)
    assert len(chosen) == len(set(chosen)) == planned._CHOICES
    assert figures["offload/activations/plan_recomputed_blocks"] == planned._CHOICES
    assert not hooked


def test_a_profile_knows_blocks_and_their_tensors(disk: Path, tmp_path: Path) -> None:
    with OffloadEngine(limited(disk)) as engine:
        passes(stack(), engine)
        profile = engine.profile()
    names = [profile.tensors[block.first].name for block in profile.blocks]
    assert [name.split()[0] for name in names] == [f"{name}.0" for name in NAMES]
    for block, after in zip(profile.blocks, profile.blocks[1:], strict=False):
        assert block.end <= after.first
        assert block.begins_at < block.ends_at <= after.begins_at
    assert [block.input_bytes for block in profile.blocks] == [32 * 64 * 4] * 3
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_a_plan_from_a_file_says_what_is_computed_again(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = passes(stack(), None)
    profile = Profile(
        0.5, 1.0, (TensorLife("x", 32 * 64 * 4, (0.0, 1.0)),), paths=(PathRates("path", 1e9, 1e9),)
    )
    file = tmp_path / "plan.json"
    save_plan(plan_lifetimes(profile, 1 << 40), profile, file, [*NAMES[:2], "layers.7"])
    with (
        caplog.at_level(logging.WARNING),
        OffloadEngine(limited(disk, plan=str(file))) as engine,
    ):
        assert_same_history(passes(stack(), engine), expected)
        assert engine.metrics()["offload/activations/plan_recomputed_blocks"] == 2
    assert "layers.7" in caplog.text, "the model has no such block"
