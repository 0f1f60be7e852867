"""A region and a queue whose backend completes requests when the test says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, plain_region


@pytest.fixture
def plain(disk: Path) -> Iterator[Region]:
    """A region of 256 pages, all of them allocated, for `ManualBackend`."""
    made = plain_region(disk, 256 * PAGE_BYTES)
    made.allocate(256 * PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture
def manual() -> ManualBackend:
    return ManualBackend()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def queue(plain: Region, manual: ManualBackend, recorder: Recorder) -> PathQueue:
    return PathQueue(plain, manual, recorder)
