"""What a run knows of its paths at the begin, and what it saves for the next run."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from offload_strategy.io.bandwidth.estimator import Transferred
from offload_strategy.io.bandwidth.history import (
    CACHE_VARIABLE,
    MeasuredRate,
    load_all_rates,
    save_rates,
)
from offload_strategy.io.bandwidth.measured_paths import MeasuredPaths
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.backends import ManualBackend, extent, make_move

READ, WRITE = Direction.READ, Direction.WRITE
PROBED = {READ: MeasuredRate(4e9, "probe", 10**9), WRITE: MeasuredRate(1e9, "probe", 10**8)}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _probes_find_what_is_expected(monkeypatch):
    monkeypatch.setattr(sys.modules[MeasuredPaths.__module__], "probe", lambda *args: PROBED)


def run_on(region: Region, processes: int = 1) -> tuple[MeasuredPaths, PathQueue]:
    """A run with one path."""
    paths, queue = MeasuredPaths(processes), PathQueue(region, ManualBackend(depth=2), Recorder())
    paths.add(queue, region.path)
    return paths, queue


def load(queue: PathQueue, rate: float, seconds: float, direction: Direction = WRITE) -> None:
    """Let an estimator see a queue that was full for so long."""
    now = 0.0
    while now < seconds:
        queue.bandwidth.add_sustained(direction, 4 * MiB, now, full=True, continues=True)
        now += 4 * MiB / rate
    queue.bandwidth.add_sustained(direction, 4 * MiB, now, full=True, continues=False)


def test_only_a_queue_with_more_than_the_path_takes_counts(plain):
    seen = []
    for pages in (8, 1):
        backend = ManualBackend(depth=2)
        queue = PathQueue(plain, backend, Recorder())
        for _ in range(8 // pages):
            make_move(queue, extent(0, pages), pages * PAGE_BYTES).submit()
            backend.complete_all()
        assert queue.bandwidth.sustained(READ) == Transferred()
        seen.append(queue.bandwidth.sustained(WRITE))
    # Neither the first block, before which nothing was, nor the end, when slots were free.
    assert 4 * PAGE_BYTES <= seen[0].nbytes <= 7 * PAGE_BYTES
    assert seen[0].seconds > 0
    assert seen[1] == Transferred()


def test_an_unknown_direction_is_probed_and_the_other_keeps_its_rate(plain):
    paths, queue = run_on(plain)
    load(queue, 300e6, 2.0)
    paths.save()
    after, again = run_on(plain)
    after.probe(again)
    assert again.bandwidth.rate(WRITE) == pytest.approx(300e6, rel=0.02)
    assert again.bandwidth.rate(READ) == pytest.approx(4e9)


def test_saving_twice_corrects_once(plain):
    paths, queue = run_on(plain)
    load(queue, 200e6, 2.0)
    paths.save()
    ((identity, rates),) = load_all_rates()
    changed = {WRITE: replace(rates[WRITE], rate=1.0)}
    save_rates(identity, changed)
    paths.save()
    assert load_all_rates() == [(identity, changed)]
