"""What all tests of the optimizer share."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.subgroup_update import Updater
from tests.optimizer.runs import give_room_for_new_weights


@pytest.fixture(autouse=True)
def _room_for_new_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new weights wait in memory in every other test, and on the tiers in the others."""
    give_room_for_new_weights(monkeypatch, bool(zlib.crc32(request.node.nodeid.encode()) % 2))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torchao compiles its updates, which takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def aheads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AheadUpdate]]:
    """Updates ahead of `step()`, in order."""
    found: list[AheadUpdate] = []
    update_ahead = Updater.update_ahead

    def noted(self: Updater, *arguments: object) -> AheadUpdate:
        found.append(update_ahead(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Updater, "update_ahead", noted)
    yield found
    found.clear()
