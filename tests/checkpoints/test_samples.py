"""What earlier versions wrote is read."""

from pathlib import Path

import pytest
import torch

from offload_strategy import OffloadEngine
from offload_strategy.checkpoints import load
from offload_strategy.io.bandwidth.history import CACHE_VARIABLE, load_rates
from offload_strategy.plan_runtime.profile import Profile
from tests.checkpoints.samples.write import IDENTITY, PROFILE, RATES, Sample, trained_by_lightning
from tests.training import settings

VERSIONS = sorted(file.parent for file in Path(__file__).parent.glob("samples/*/profile.json"))


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def samples(request):
    return request.param


@pytest.mark.parametrize("states", ["optimizer.pt", "checkpoint.pt"])
def test_training_goes_on_from_the_checkpoint_of_a_version(samples, states, disk):
    begun = torch.arange(512.0).view(8, 64)
    with OffloadEngine(settings(disk)) as engine:
        sample = Sample(engine)
        sample.model.load_state_dict(load(samples / "checkpoint.pt")["model"])
        found = load(samples / states)
        sample.optimizer.load_state_dict(found.get("optimizer", found))
        [state] = sample.optimizer.state_dict()["state"].values()
        assert torch.equal(state["momentum_buffer"], torch.full((8, 64), 1.5))
        assert torch.equal(sample.model.weight, begun - 0.5 * (1 + 1.5))
        sample.step()
        assert torch.equal(sample.model.weight, begun - 0.5 * (1 + 1.5 + 1.75))


def test_lightning_goes_on_from_the_checkpoint_of_a_version(samples, disk):
    trainer = trained_by_lightning(disk, 3, samples / "lightning.ckpt")
    [weight] = trainer.lightning_module.parameters()
    assert trainer.global_step == 3
    assert torch.equal(weight, torch.arange(512.0).view(8, 64) - 0.5 * (1 + 1.5 + 1.75))


def test_the_profile_of_a_version_is_read(samples):
    assert Profile.load(samples / "profile.json") == PROFILE


def test_the_rates_of_a_version_are_read(samples, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(samples / "cache"))
    assert load_rates(IDENTITY) == RATES
