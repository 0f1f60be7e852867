"""The engine of most tests of activations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_strategy import OffloadEngine
from tests.training import activations_only


@pytest.fixture
def engine(disk: Path) -> Iterator[OffloadEngine]:
    with activations_only(disk) as made:
        yield made
