"""What all tests of the optimizer share."""

from __future__ import annotations

import zlib

import pytest

from offload_strategy.host_memory.idle_memory import IdleLimit


@pytest.fixture(autouse=True)
def _room_for_new_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new weights wait in memory in every other test, and on the tiers in the others."""
    has_room = bool(zlib.crc32(request.node.nodeid.encode()) % 2)
    monkeypatch.setattr(IdleLimit, "has_room", lambda self, nbytes: has_room)
