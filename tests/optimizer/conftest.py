"""What all tests of the optimizer share."""

import zlib

import pytest
import torch

from offload_strategy.optimizer import offloaded_optimizer
from offload_strategy.optimizer.overlap import overlap_modes
from offload_strategy.optimizer.overlap.overlap_modes import RetainedGradients
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.store.tiers import HostTier
from tests.optimizer.runs import give_room_for_new_weights


@pytest.fixture(autouse=True)
def _room_for_new_weights(request, monkeypatch):
    """Let new weights wait in memory in every other test, and on the tiers in the others."""
    give_room_for_new_weights(monkeypatch, bool(zlib.crc32(request.node.nodeid.encode()) % 2))


@pytest.fixture
def gradients_leave(monkeypatch):
    """Every gradient of the engines to come waits for `step()` in the tiers, if any may."""
    monkeypatch.setattr(overlap_modes, "_SMALLEST_BYTES", 1)
    monkeypatch.setattr(
        offloaded_optimizer,
        "RetainedGradients",
        lambda store, tiers, _: RetainedGradients(store, tiers, HostTier("", 0)),
    )


@pytest.fixture
def uncompiled():
    """torchao compiles its updates, which takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def aheads(monkeypatch):
    """Updates ahead of `step()`, in order."""
    found = []
    update_ahead = Updater.update_ahead

    def noted(self, *arguments):
        found.append(update_ahead(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Updater, "update_ahead", noted)
    yield found
    found.clear()
