"""An engine with a limit of memory: what its plan keeps, a plan from a file, what is refused."""

import pytest
import torch
from torch import nn

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.host_memory import memory_limits
from offload_strategy.host_memory.memory_limits import PeakMeter
from offload_strategy.plan_runtime import lifetime_plan as plans
from offload_strategy.units import GiB, MiB
from tests.activations.support import noise
from tests.training import assert_same_history, gradients, settings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def limited(directory, **planning):
    planning = {"device_memory": "auto", **planning}
    config = settings(directory, optimizer={"enabled": False}, planning=planning)
    return {**config, "activations": {"min_size": 1}}


def train(model, lengths, engine=None):
    """Gradients of a pass for each length of a batch."""
    history = []
    if engine is not None:
        engine.attach(model)
    for length in lengths:
        model.zero_grad()
        model(noise(length, 256)).backward()
        history.append(gradients(model))
    return history


def test_an_engine_plans_and_keeps_to_a_file(tmp_path):
    lengths = (8, 8, 8, 8, 12, 8)
    plain = train(Net(), lengths)
    with OffloadEngine(limited(tmp_path)) as engine:
        assert_same_history(train(Net(), lengths, engine), plain)
        figures, profile = engine.metrics(), engine.profile()
        assert figures["offload/activations/plan_peak_bytes"] > 0
        assert figures["offload/activations/plan_limit_bytes"] > 0
        assert figures["offload/activations/step_left_bytes"] == 0, "there is room for all"
    assert profile is not None
    # Items have the names of the modules that save them.
    assert profile.tensors[0].name == "layers.0 float32[8, 256]", "the input"
    assert profile.tensors[1].name == "Net float32[8, 256]", "what tanh saves, outside the layers"

    file = tmp_path / "plan.json"
    plans.save_plan(plans.plan_lifetimes(profile, 1 << 40), profile, file)
    text = file.read_text()
    assert text.count('"stays"') == len(profile.tensors)
    file.write_text(text.replace('"stays"', '"leaves"', 3))
    with OffloadEngine(limited(tmp_path, plan=str(file))) as engine:
        assert_same_history(train(Net(), lengths[:4], engine), plain[:4])
        figures = engine.metrics()
    leave = sum(tensor.nbytes for tensor in profile.tensors[:3])
    stay = sum(tensor.nbytes for tensor in profile.tensors[3:])
    assert figures["offload/activations/step_saved_bytes"] > leave
    # What is still on its way when backward begins stays.
    assert figures["offload/activations/step_left_bytes"] <= leave
    assert figures["offload/activations/kept_bytes"] == 4 * stay, "what the file says"
    assert figures["offload/activations/plan_deviations"] == 0


def test_what_uses_memory_up_is_refused_before_the_first_step(tmp_path):
    model = Net()
    with (
        OffloadEngine(limited(tmp_path, device_memory="10MiB")) as engine,
        pytest.raises(ConfigError, match=r"planning\.device_memory is 10 MiB"),
    ):
        train(model, (8,), engine)


def test_the_meter_sees_what_was_and_forgets_it(tmp_path, monkeypatch):
    meter = PeakMeter(torch.empty(0))
    meter.reset_peak()
    before = meter.peak_bytes()
    block = torch.ones(256 * MiB // 4)
    # Where memory is short, the system takes pages of libraries away meanwhile.
    assert meter.peak_bytes() >= before + 128 * MiB
    del block
    meter.reset_peak()
    assert meter.peak_bytes() < before + 128 * MiB
    assert 0 < meter.used_bytes() <= meter.peak_bytes() < meter.default_limit_bytes(1)
    monkeypatch.setattr(meter, "_proc", tmp_path / "nowhere")
    meter.reset_peak()
    assert abs(meter.peak_bytes() - meter.used_bytes()) < 8 * MiB, "what there is now"


def test_the_processes_of_a_machine_share_what_is_free(disk, monkeypatch):
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: 40 * GiB)
    limits = []
    for processes in (1, 4):
        with OffloadEngine(settings(disk), processes=processes) as engine:
            engine._choice.limit.measure(torch.empty(0))
            limits.append(engine._choice.limit.limit_bytes())
            assert engine._choice.limit.free_bytes(torch.device("meta")) == 40 * GiB // processes
    assert limits[0] - limits[1] == pytest.approx(0.95 * 30 * GiB, abs=64 * MiB)
