"""Optimizers that quantize their states: the quantized bytes are what is swapped, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from offload_strategy import OffloadEngine
from offload_strategy.errors import ConfigError
from offload_strategy.optimizer.states.subgroups import flatten_wrappers, packable
from offload_strategy.optimizer.user_class.compatibility import check_supported
from tests.optimizer.custom_optimizers import QuantizedMomentum
from tests.optimizer.runs import EVERY_OVERLAP, assert_same_state_dict, offloading
from tests.training import bits, in_turn, moved

WIDTH = 256


class Net(nn.Module):
    """Large weights, which are quantized, and small ones, which are not; some are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).to(self.first.weight.dtype)
        return self.out(self.norm(self.frozen(F.gelu(self.first(x)))))


def _torchao(name: str) -> Callable[..., Optimizer]:
    def make(groups: Any, **options: Any) -> Optimizer:
        return getattr(pytest.importorskip("torchao.optim"), name)(groups, **options)

    return make


def _bitsandbytes(groups: Any, **options: Any) -> Optimizer:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(groups, **options)


MAKE: dict[str, Callable[..., Optimizer]] = {
    "momentum": QuantizedMomentum,
    "replaced momentum": lambda groups, **o: QuantizedMomentum(groups, replace=True, **o),
    "torchao AdamW8bit": _torchao("AdamW8bit"),
    "torchao AdamW4bit": _torchao("AdamW4bit"),
    "torchao AdamWFp8": _torchao("AdamWFp8"),
    "bitsandbytes AdamW8bit": _bitsandbytes,
}


class Run:
    """A training run with two groups of different learning rates, and a schedule."""

    def __init__(self, name: str, engine: OffloadEngine | None = None) -> None:
        torch.manual_seed(0)
        self.model, self.engine = Net(), engine
        slow, fast = list(self.model.first.parameters()), []
        fast = [p for p in self.model.parameters() if all(p is not other for other in slow)]
        groups = [{"params": fast}, {"params": slow, "lr": 3e-3}]
        inner = MAKE[name](groups, lr=1e-2)
        self.schedule = StepLR(inner, 3, 0.5)
        self.optimizer = inner if engine is None else engine.attach(self.model, inner)

    def train(self, steps: range) -> list[Any]:
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 11, (4, 5), generator=generator)
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(bits(loss))
        return losses

    def saved(self) -> bytes:
        file = io.BytesIO()
        parts = self.model, self.optimizer, self.schedule
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        states = torch.load(io.BytesIO(saved), weights_only=False)
        for part, state in zip((self.model, self.optimizer, self.schedule), states, strict=True):
            part.load_state_dict(state)

    def assert_same(self, plain: Run) -> None:
        assert_same_state_dict(self.model.state_dict(), plain.model.state_dict())
        assert_same_state_dict(self.optimizer.state_dict(), plain.optimizer.state_dict())


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torchao compiles its updates, which takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(("name", "overlap"), in_turn(MAKE, EVERY_OVERLAP))
@pytest.mark.usefixtures("uncompiled")
def test_quantized_states_go_to_and_from_plain_checkpoints(
    name: str, overlap: str, disk: Path
) -> None:
    plain = Run(name)
    losses = plain.train(range(8))
    first = Run(name)
    first.train(range(2))
    with offloading(disk, overlap) as engine:
        second = Run(name, engine)
        second.load(first.saved())
        second.assert_same(first)
        assert second.train(range(2, 4)) == losses[2:4]
        saved = second.saved()
    third = Run(name)
    third.load(saved)
    assert third.train(range(4, 6)) == losses[4:6]
    with offloading(disk, overlap) as engine:  # in the middle, with the states that it has
        third.optimizer = engine.attach(third.model, third.optimizer)
        assert third.train(range(6, 8)) == losses[6:]
        third.assert_same(plain)
        before = moved(engine, "optimizer")
        third.train(range(8, 16))
        # The quantized weights alone have more bytes than that, and far fewer as float32.
        quantized = 2 * WIDTH * WIDTH // (1 if "AdamW" in name else 2) // (1 + ("4bit" in name))
        assert quantized < (moved(engine, "optimizer") - before) / 8 < 2 * quantized
        assert moved(engine, "optimizer", "read") > 0
        plain.train(range(8, 16))
        third.assert_same(plain)
        parameter = third.model.first.weight
        third.optimizer.state[parameter] = state = third.optimizer.state[parameter]
        assert_same_state_dict(state, plain.optimizer.state[plain.model.first.weight])


def test_updates_are_compiled_once(disk: Path) -> None:
    compiled = torch._dynamo.utils.counters["stats"]

    def train(engine: OffloadEngine | None = None) -> tuple[list[Any], Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        optimizer = _torchao("AdamW8bit")(model.parameters())
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        history = []
        for step in range(5):
            model(torch.full((2, 64), 1.0 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append([*map(bits, model.parameters()), compiled["unique_graphs"]])
        return history, optimizer

    plain, plain_optimizer = train()
    for overlap in EVERY_OVERLAP:
        with offloading(disk, overlap) as engine:
            offloaded, optimizer = train(engine)
            assert [each[:-1] for each in offloaded] == [each[:-1] for each in plain]
            assert_same_state_dict(optimizer.state_dict(), plain_optimizer.state_dict())
            assert len({each[-1] for each in offloaded[1:]}) == 1  # nothing was compiled again


@pytest.mark.parametrize("name", ["momentum", "torchao AdamW8bit", "bitsandbytes AdamW8bit"])
def test_quantized_states_are_not_rounded_once_more(name: str, disk: Path) -> None:
    with (
        offloading(disk, optimizer={"state_dtype": "bfloat16"}) as engine,
        pytest.raises(ConfigError, match=r"quantizes its states itself.*state_dtype.*float32"),
    ):
        Run(name, engine)


def test_parameters_that_an_optimizer_moves_are_refused(disk: Path) -> None:
    model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    inner = _bitsandbytes(model.parameters())
    with (
        offloading(disk, optimizer={"enabled": True}) as engine,
        pytest.raises(ConfigError, match="make them contiguous"),
    ):
        engine.attach(model, inner)


def test_random_rounding_is_refused(disk: Path) -> None:
    model = nn.Linear(64, 64).bfloat16()
    inner = _torchao("AdamW8bit")(model.parameters(), bf16_stochastic_round=True)
    with (
        offloading(disk, optimizer={"enabled": True}) as engine,
        pytest.raises(ConfigError, match="draws random numbers"),
    ):
        engine.attach(model, inner)


@pytest.mark.parametrize("overlap", EVERY_OVERLAP)
def test_parameters_may_override_settings(overlap: str, disk: Path) -> None:
    """Transformers does that for embeddings, whose states then have 32 bits."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()

    def overridden(engine: OffloadEngine | None = None) -> Run:
        run = Run("bitsandbytes AdamW8bit", engine)
        manager.initialize()
        manager.register_module_override(run.model.embedding, "weight", {"optim_bits": 32})
        manager.override_config(run.model.first.weight, "lr", 1e-4)
        manager.register_parameters(run.model.parameters())  # by their places, of other groups
        return run

    plain = overridden()
    losses = plain.train(range(5))
    with offloading(disk, overlap) as engine:
        run = overridden(engine)
        assert run.train(range(5)) == losses
        run.assert_same(plain)
        assert run.optimizer.state[run.model.embedding.weight]["state1"].dtype is torch.float32
        assert run.optimizer.state[run.model.first.weight]["state1"].dtype is torch.uint8
    manager.initialize()


class LoadsByItself(AdamW):
    """As torchao's and bitsandbytes' do, it sees what is loaded, and casts it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)


@pytest.mark.parametrize("kind", [LoadsByItself, _torchao("AdamW8bit"), _bitsandbytes])
@pytest.mark.usefixtures("uncompiled")
def test_loading_does_not_round_master_weights(kind: Any, disk: Path) -> None:
    model = nn.Linear(64, 64).bfloat16()
    with offloading(disk, optimizer={"master_weights": True}) as engine:
        optimizer = engine.attach(model, kind(model.parameters(), lr=1e-3))
        model(torch.ones(2, 64, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        assert bits(saved["state"][0]["master_weight"].bfloat16()) == bits(model.weight)
        optimizer.load_state_dict(saved)
        assert_same_state_dict(optimizer.state_dict(), saved)
        assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize("name", [name for name in MAKE if name != "replaced momentum"])
@pytest.mark.usefixtures("uncompiled")
def test_bytes_of_quantized_states_are_known_in_advance(name: str) -> None:
    parameters = [nn.Parameter(torch.randn(size)) for size in ((256, 384), (64, 64), (64,), (9,))]
    optimizer = MAKE[name]([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}])
    expected = sum(check_supported(optimizer).state_bytes)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = map(flatten_wrappers, optimizer.state.values())
    held = sum(v.nbytes for state in states for v in state.values() if packable(v))
    assert abs(expected - held) < 0.05 * held
