"""What a path carries while its queue is never empty, and what of that is kept for the next run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from offload_strategy.io.bandwidth.estimator import Bandwidth, Sustained
from offload_strategy.io.bandwidth.history import CACHE_VARIABLE, Figure, keep, recall
from offload_strategy.io.bandwidth.path_rates import KnownPaths
from offload_strategy.io.bandwidth.probe import PathBandwidth
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.backends import ManualBackend, extent, make_move, plain_space

READ, WRITE = Direction.READ, Direction.WRITE
module = sys.modules[KnownPaths.__module__]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = plain_space(disk, 64 * PAGE_BYTES)
    made.allocate(64 * PAGE_BYTES)
    yield made
    made.close()


def queue_of(region: Region, depth: int = 2) -> PathQueue:
    return PathQueue(region, ManualBackend(depth=depth), Recorder())


def drain(queue: PathQueue) -> None:
    assert isinstance(queue.backend, ManualBackend)
    queue.backend.complete_all()


def load(queue: PathQueue, rate: float, seconds: float, direction: Direction = WRITE) -> None:
    """As if the queue had been full for so long."""
    now = 0.0
    while now < seconds:
        queue.bandwidth.carried(direction, 4 * MiB, now, full=True, goes_on=True)
        now += 4 * MiB / rate
    queue.bandwidth.carried(direction, 4 * MiB, now, full=True, goes_on=False)


# ---------------------------------------------------------------------- sums of a run
def test_a_direction_that_is_always_full_tells_its_rate() -> None:
    bandwidth = Bandwidth()
    for block in range(11):
        bandwidth.carried(WRITE, 100, float(block), full=True, goes_on=True)
    assert bandwidth.sustained(WRITE) == Sustained(1000, 10.0)
    assert bandwidth.sustained(READ) == Sustained(0, 0.0)


def test_pauses_and_single_blocks_tell_nothing() -> None:
    bandwidth = Bandwidth()
    for block in range(10):  # one now and then
        bandwidth.carried(READ, 100, float(block), full=False, goes_on=False)
    bandwidth.carried(READ, 100, 20.0, full=True, goes_on=False)  # the last of a burst
    bandwidth.carried(READ, 100, 30.0, full=True, goes_on=True)
    assert bandwidth.sustained(READ) == Sustained(0, 0.0)
    bandwidth.carried(READ, 100, 31.0, full=True, goes_on=True)
    assert bandwidth.sustained(READ) == Sustained(100, 1.0)


def test_each_direction_has_its_time_to_itself() -> None:
    bandwidth = Bandwidth()
    for block in range(101):  # both at once: a path that does both has the sum
        bandwidth.carried(WRITE, 100, float(block), full=True, goes_on=True)
        bandwidth.carried(READ, 200, block + 0.5, full=True, goes_on=True)
    assert bandwidth.sustained(WRITE) == Sustained(10000, 100.0)
    assert bandwidth.sustained(READ) == Sustained(20000, 100.0)


def test_a_queue_with_more_than_the_path_takes_is_counted(region: Region) -> None:
    queue = queue_of(region)
    make_move(queue, extent(0, 8), 8 * PAGE_BYTES).submit()
    drain(queue)
    nbytes, seconds = queue.bandwidth.sustained(WRITE)
    # Not the first, before which nothing was, nor the end, when fewer were left than slots.
    assert 4 * PAGE_BYTES <= nbytes <= 7 * PAGE_BYTES
    assert seconds > 0
    assert queue.bandwidth.sustained(READ) == Sustained()


def test_a_queue_with_one_block_at_a_time_is_not(region: Region) -> None:
    queue = queue_of(region, depth=4)
    for page in range(8):
        make_move(queue, extent(page), PAGE_BYTES).submit()
        drain(queue)
    assert queue.bandwidth.sustained(WRITE) == Sustained()


# ---------------------------------------------------------------------- runs
def test_the_next_run_begins_with_what_this_one_has_seen(region: Region) -> None:
    known, queue = KnownPaths(1), queue_of(region)
    known.begin(queue, region.path)
    assert queue.bandwidth.rate(WRITE) is None
    load(queue, 200e6, 2.0)
    known.end()

    after, again = KnownPaths(1), queue_of(region)
    after.begin(again, region.path)
    assert again.bandwidth.rate(WRITE) == pytest.approx(200e6, rel=0.02)
    assert again.bandwidth.rate(READ) is None, "of which nothing was seen"
    assert after.rate_before(again, WRITE) == pytest.approx(200e6, rel=0.02)
    assert after.rate_before(again, READ) is None


@pytest.mark.parametrize(("rate", "seconds"), [(200e6, 0.5), (20e6, 2.0)], ids=["short", "little"])
def test_a_path_that_was_rarely_busy_tells_nothing(
    region: Region, rate: float, seconds: float
) -> None:
    known, queue = KnownPaths(1), queue_of(region)
    known.begin(queue, region.path)
    load(queue, rate, seconds)
    assert [standing.observed for standing in known.standings()] == [None, None]
    known.end()
    after, again = KnownPaths(1), queue_of(region)
    after.begin(again, region.path)
    assert again.bandwidth.rate(WRITE) is None


def test_another_number_of_processes_has_figures_of_its_own(region: Region) -> None:
    known, queue = KnownPaths(4), queue_of(region)
    known.begin(queue, region.path)
    load(queue, 200e6, 2.0)
    known.end()
    alone, again = KnownPaths(1), queue_of(region)
    alone.begin(again, region.path)
    assert again.bandwidth.rate(WRITE) is None


def test_a_probe_is_corrected_and_what_was_not_seen_of_it_stays(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = []

    def probe(*_: object) -> PathBandwidth:
        probes.append(1)
        return PathBandwidth(4e9, 1e9, 0.25, 0.25, 10**9, 10**8)

    monkeypatch.setattr(module, "probe", probe)
    known, queue = KnownPaths(1), queue_of(region)
    known.begin(queue, region.path)
    known.measure(queue)
    assert queue.bandwidth.rate(WRITE) == pytest.approx(1e9)
    load(queue, 0.25e9, 2.0)
    standings = {standing.direction: standing for standing in known.standings()}
    assert standings[WRITE].before == Figure(1e9, "probe", 10**8)
    assert standings[WRITE].observed == pytest.approx(0.25e9, rel=0.02)
    assert standings[READ].observed is None
    known.end()

    after, again = KnownPaths(1), queue_of(region)
    after.begin(again, region.path)
    after.measure(again)
    assert probes == [1], "what is known need not be measured again"
    assert again.bandwidth.rate(WRITE) == pytest.approx(0.5e9, rel=0.02)
    assert again.bandwidth.rate(READ) == pytest.approx(4e9)
    before = {standing.direction: standing.before for standing in after.standings()}
    assert before[READ] == Figure(4e9, "probe", 10**9)
    assert before[WRITE] is not None
    assert (before[WRITE].source, before[WRITE].runs) == ("observed", 1)


def test_a_direction_that_is_not_known_is_measured_and_the_other_kept(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "probe", lambda *_: PathBandwidth(4e9, 1e9, 0.25, 0.25, 10**9, 10**8)
    )
    known, queue = KnownPaths(1), queue_of(region)
    known.begin(queue, region.path)
    load(queue, 300e6, 2.0)
    known.end()
    after, again = KnownPaths(1), queue_of(region)
    after.begin(again, region.path)
    after.measure(again)
    assert again.bandwidth.rate(WRITE) == pytest.approx(300e6, rel=0.02)
    assert again.bandwidth.rate(READ) == pytest.approx(4e9)


def test_to_end_twice_corrects_once(region: Region) -> None:
    known, queue = KnownPaths(1), queue_of(region)
    known.begin(queue, region.path)
    (standing, _) = known.standings()
    load(queue, 200e6, 2.0)
    identity = known._paths[queue].identity
    known.end()
    first = recall(identity)
    keep(identity, {WRITE: replace(first[WRITE], rate=1.0)})
    known.end()
    assert recall(identity)[WRITE].rate == 1.0
    assert standing.path == region.path
