"""Engines that stream weights; a test that needs another setting parametrizes it."""

import pytest

from offload_strategy.weights import block_residency
from tests.weights.support import streaming


@pytest.fixture
def overlap():
    """When updates run; with "in memory", states of the optimizer are not offloaded."""
    return "commit"


@pytest.fixture
def activations():
    return True


@pytest.fixture
def parameters():
    return {}


@pytest.fixture
def sections(overlap, activations, parameters):
    return {
        "optimizer": {"enabled": False} if overlap == "in memory" else {"overlap": overlap},
        "activations": {"enabled": activations},
        "parameters": {"enabled": True, "min_size": 1, **parameters},
    }


@pytest.fixture
def engine(disk, sections):
    with streaming(disk, **sections) as made:
        yield made


@pytest.fixture
def no_room(monkeypatch):
    """So that what is accessed outside its block leaves at once, as in large models."""
    monkeypatch.setattr(block_residency, "_ACCESSED_BYTES", 0)


@pytest.fixture
def accessed(monkeypatch):
    """The weights that are accessed outside their blocks."""
    seen, residency = [], block_residency.BlockResidency
    usual = residency.on_access

    def noted(self, weight):
        seen.append(weight)
        usual(self, weight)

    monkeypatch.setattr(residency, "on_access", noted)
    return seen
