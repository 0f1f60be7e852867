"""What leaves where the config leaves it open (``mode: auto``): as much as memory requires."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from offload_strategy import ConfigError, OffloadConfig, OffloadEngine
from offload_strategy.config import Client
from offload_strategy.host_memory.memory_limits import PeakMeter
from offload_strategy.optimizer.offloaded_optimizer import OffloadedOptimizer
from offload_strategy.telemetry.recorder import CLIENTS
from offload_strategy.units import MiB
from tests.training import assert_same_bits, moved, on_disk, weights

LIMIT = 512 * MiB
WIDTH, LAYERS = 1024, 8  # 32 MiB of weights, as much of gradients, 64 MiB of states


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*chain.from_iterable(layers))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def attached_network(engine: OffloadEngine) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, engine.attach(model, torch.optim.AdamW(model.parameters()))


def in_use(monkeypatch: pytest.MonkeyPatch, mebibytes: int) -> None:
    """Let the process have so much in memory, whatever it really has."""
    for name in ("used_bytes", "peak_bytes"):
        monkeypatch.setattr(PeakMeter, name, lambda _: mebibytes * MiB)


def moves(engine: OffloadEngine, client: Client) -> bool:
    on_disk(engine)
    return moved(engine, client) + moved(engine, client, "forwarded") > 0


def sections(disk: Path, **given: Any) -> dict[str, Any]:
    tiers = [{"name": "nvme", "kind": "ssd", "path": str(disk), "capacity": "1GiB"}]
    return {"tiers": tiers, "memory": LIMIT, **given}


#: What the process has in memory before, in MiB, and the batch: what leaves then.
CASES = {
    "everything stays": (32, 16, set()),
    "activations leave": (232, 4096, {"activations"}),
    "optimizer states leave": (332, 16, {"optimizer"}),
    "weights are streamed": (420, 16, {"optimizer", "parameters"}),
}


@pytest.mark.parametrize(("before", "batch", "leave"), CASES.values(), ids=CASES)
def test_as_much_leaves_as_memory_requires(disk, monkeypatch, before, batch, leave):
    plain, model = network(), network()
    train(plain, torch.optim.AdamW(plain.parameters()), batch)
    own = torch.optim.AdamW(model.parameters())
    in_use(monkeypatch, before)
    with OffloadEngine(sections(disk)) as engine:
        optimizer = engine.attach(model, own)
        assert (optimizer is own) == ("optimizer" not in leave)
        train(model, optimizer, batch, steps=1)
        assert {client for client in CLIENTS if moves(engine, client)} == leave
        chosen = engine.effective_config()
        assert {client for client in CLIENTS if getattr(chosen, client).enabled} == leave
        assert (chosen.planning.device_memory == LIMIT) == ("activations" in leave)
        assert OffloadConfig(**yaml.safe_load(chosen.to_yaml())) == chosen
    with OffloadEngine(chosen) as engine:  # from the beginning, with what was chosen
        model, optimizer = attached_network(engine)
        train(model, optimizer, batch)
        assert {client for client in CLIENTS if moves(engine, client)} == leave
        assert_same_bits(weights(model), weights(plain))


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_accumulate_count_as_a_whole(disk, monkeypatch, accumulates):
    in_use(monkeypatch, 376)
    with OffloadEngine(sections(disk)) as engine:
        if accumulates:
            engine.microbatch(0, last=False)
        attached_network(engine)
        assert engine.effective_config().parameters.enabled is accumulates


def test_what_the_config_says_wins(disk, monkeypatch):
    in_use(monkeypatch, 332)
    model = network()
    own = torch.optim.AdamW(model.parameters())
    config = sections(disk, optimizer={"enabled": False}, activations={"min_size": 1})
    with OffloadEngine(config) as engine:
        assert engine.attach(model, own) is own
        train(model, own, 64, steps=1)
        assert moves(engine, "activations")
    with OffloadEngine({"mode": "always", **sections(disk)}) as engine:
        assert isinstance(engine.attach(model, own), OffloadedOptimizer)


@pytest.mark.parametrize(
    ("given", "enabled"),
    [
        ({}, ["auto", "auto", "auto"]),
        ({"mode": "always"}, [True, True, False]),
        (
            {"activations": {"min_size": 1}, "optimizer": {"tiers": ["nvme"]}},
            [True, "auto", "auto"],
        ),
        ({"optimizer": {"enabled": "auto", "overlap": "off"}}, ["auto", "auto", "auto"]),
        ({"optimizer": {"overlap": "off"}, "parameters": {"min_size": 1}}, ["auto", True, "auto"]),
    ],
)
def test_sections_with_settings_are_on(disk, given, enabled):
    config = OffloadConfig.load(sections(disk, **given))
    assert [getattr(config, client).enabled for client in CLIENTS] == enabled
    assert config.memory.limit == LIMIT
    assert OffloadConfig(**yaml.safe_load(config.to_yaml())) == config


def test_a_limit_below_what_is_in_use_is_refused_before_a_step(disk, monkeypatch):
    in_use(monkeypatch, 600)
    with OffloadEngine(sections(disk, parameters={"enabled": False})) as engine:
        model, optimizer = attached_network(engine)
        with pytest.raises(ConfigError, match=r"memory\.limit is 512 MiB, and .* MiB are in use"):
            train(model, optimizer, 256)
        assert_same_bits(weights(model), weights(network()))


def test_growing_batches_make_activations_leave_in_the_pass_that_needs_it(disk, monkeypatch):
    in_use(monkeypatch, 232)
    with OffloadEngine(sections(disk)) as engine:
        model, optimizer = attached_network(engine)
        train(model, optimizer, 64)
        assert not moves(engine, "activations")
        train(model, optimizer, 4096, steps=1)
        assert moves(engine, "activations")
