"""An engine with a limit of memory plans, keeps to a plan from a file, and says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadConfig, OffloadEngine
from offload_strategy.errors import ConfigError
from offload_strategy.host_memory.memory_limits import PeakMeter
from offload_strategy.plan_runtime.lifetime_plan import plan_lifetimes, save_plan
from offload_strategy.units import MiB
from tests.training import Numbers, assert_same_history, gradients, settings


class Net(nn.Module):
    def __init__(self, checkpointed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number < self.checkpointed:
                x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            else:
                x = torch.tanh(layer(x))
        return x.square().mean()


def limited(directory: Path, limit: str = "auto") -> dict[str, Any]:
    config = settings(directory, optimizer={"enabled": False}, planning={"device_memory": limit})
    config["activations"] = {"min_size": 1}
    return config


def train(model: Net, *batches: torch.Tensor) -> list[Numbers]:
    """Gradients of a pass for each batch."""
    history = []
    for batch in batches:
        model.zero_grad()
        model(batch).backward()
        history.append(gradients(model))
    return history


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OffloadEngine]:
    with OffloadEngine(limited(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_gradients_are_those_of_plain_training(engine: OffloadEngine, checkpointed: int) -> None:
    torch.manual_seed(0)
    model = Net(checkpointed)
    inputs = [torch.randn(rows, 256) for rows in (8, 8, 8, 8, 12, 8)]
    plain = train(model, *inputs)
    engine.attach(model)
    assert_same_history(train(model, *inputs), plain)
    figures = engine.metrics()
    assert figures["offload/activations/plan_peak_bytes"] > 0
    assert figures["offload/activations/plan_limit_bytes"] > 0
    planned = engine._activations.planned if engine._activations is not None else None
    assert planned is not None
    assert planned.plan is not None, "three passes were looked at"
    assert planned.plan.moves == (), "there is room for all"


def test_what_uses_memory_up_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with OffloadEngine(limited(tmp_path, "10MiB")) as engine:
        model = Net()
        engine.attach(model)
        with pytest.raises(ConfigError, match=r"planning\.device_memory is 10 MiB"):
            model(torch.randn(8, 256))


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        ({"enabled": False}, "needs activations.enabled: true"),
        ({"budget": "50%"}, "leave out activations.budget"),
        ({"prefetch": "1GiB"}, "leave out activations.prefetch"),
    ],
)
def test_a_plan_and_a_budget_are_not_both_asked_for(activations: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OffloadConfig(activations=activations, planning={"device_memory": "1GiB"})


def test_a_meter_that_cannot_start_over_tells_what_there_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = PeakMeter(torch.empty(0))
    monkeypatch.setattr(meter, "_proc", tmp_path / "nowhere")
    meter.reset_peak()
    assert abs(meter.peak_bytes() - meter.used_bytes()) < 8 * MiB


def test_the_meter_sees_what_was_and_forgets_it() -> None:
    meter = PeakMeter(torch.empty(0))
    meter.reset_peak()
    before = meter.peak_bytes()
    block = torch.ones(256 * MiB // 4)
    # Where memory is short, the system takes pages of libraries away meanwhile.
    assert meter.peak_bytes() >= before + 128 * MiB
    del block
    meter.reset_peak()
    assert meter.peak_bytes() < before + 128 * MiB
    assert 0 < meter.used_bytes() <= meter.peak_bytes() < meter.total_bytes()


# ---------------------------------------------------------------- a plan from a file
def test_items_have_the_names_of_the_modules_that_save_them(engine: OffloadEngine) -> None:
    model = Net()
    engine.attach(model)
    train(model, *torch.randn(2, 8, 256))
    profile = engine.profile()
    assert profile is not None
    names = [tensor.name for tensor in profile.tensors]
    assert names[0] == "layers.0 float32[8, 256]", "the input"
    assert names[1] == "Net float32[8, 256]", "what tanh saves, outside the layers"


def test_an_engine_keeps_to_a_file(tmp_path: Path) -> None:
    config = limited(tmp_path)
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 256)
    plain = train(model, x)
    with OffloadEngine(config) as engine:
        engine.attach(model)
        train(model, x, x, x)
        profile = engine.profile()
        assert profile is not None
        engine.detach_model(model)
    file = tmp_path / "plan.json"
    save_plan(plan_lifetimes(profile, 1 << 40), profile, file)
    text = file.read_text()
    assert text.count('"stays"') == len(profile.tensors)
    file.write_text(text.replace('"stays"', '"leaves"', 3))
    config["planning"]["plan"] = str(file)
    with OffloadEngine(config) as engine:
        engine.attach(model)
        assert_same_history(train(model, x, x, x, x), 4 * plain)
        figures = engine.metrics()
        wanted = sum(tensor.nbytes for tensor in profile.tensors[:3])
        assert figures["offload/activations/step_saved_bytes"] > wanted
        # What is still on its way when backward begins stays.
        assert figures["offload/activations/step_left_bytes"] <= wanted
        assert figures["offload/activations/kept_bytes"] == 4 * (
            sum(tensor.nbytes for tensor in profile.tensors[3:])
        ), "what the file says"
        assert figures["offload/activations/plan_deviations"] == 0


def test_a_plan_without_a_limit_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"planning\.plan needs planning\.device_memory"):
        OffloadConfig(planning={"plan": str(tmp_path / "plan.json")})
    planning = {"device_memory": "1GiB", "plan": str(tmp_path / "plan.json")}
    config = settings(tmp_path, planning=planning)
    config["activations"] = {}
    with pytest.raises(ConfigError, match="cannot be read as a plan"):
        OffloadEngine(config)
