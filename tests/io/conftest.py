"""Regions, and a queue whose backend completes requests when the test says so."""

import pytest

from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.backends import ManualBackend, plain_region


@pytest.fixture
def plain(disk):
    """A region of 256 pages, all of them allocated, for `ManualBackend`."""
    made = plain_region(disk, 256 * PAGE_BYTES)
    made.allocate(256 * PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture(params=["auto", False], ids=["direct", "buffered"])
def region(request, disk):
    """A region of 16 MiB, all of them allocated, with direct I/O and without."""
    made = Region(disk, "nvme", 16 * MiB, direct=request.param)
    if request.param and not made.direct:
        made.close()
        pytest.skip("the temporary directory does not take direct I/O")
    made.allocate(16 * MiB)
    yield made
    made.close()


@pytest.fixture
def manual():
    return ManualBackend()


@pytest.fixture
def queue(plain, manual):
    return PathQueue(plain, manual, Recorder())
