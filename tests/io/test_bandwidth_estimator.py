"""Rates that are estimated from completed requests, on a clock that the tests set."""

from __future__ import annotations

import pytest

from offload_strategy.io.bandwidth.estimator import BandwidthEstimator, Transferred
from offload_strategy.telemetry import Direction
from offload_strategy.units import MiB

READ, WRITE = Direction.READ, Direction.WRITE
BLOCK = 4 * MiB


def run(
    estimator: BandwidthEstimator,
    direction: Direction,
    rate: float,
    seconds: float,
    begin: float = 0.0,
) -> float:
    """Requests at a steady rate, one at a time; returns when the last completed."""
    now = begin
    while now < begin + seconds:
        begun, busy = now, estimator.begins(now, saturated=True)
        now += BLOCK / rate
        estimator.completed(direction, BLOCK, now, begun=begun, busy_before=busy, saturated=False)
    return now


def test_a_saturated_path_shows_its_rate_and_an_unknown_one_none():
    estimator = BandwidthEstimator()
    assert estimator.rate(READ) is None
    assert estimator.round_trip() is None
    end = run(estimator, WRITE, 300e6, 0.5)
    run(estimator, WRITE, 300e6, 0.5, begin=end + 100)  # the pause does not count
    assert estimator.rate(WRITE) == pytest.approx(300e6, rel=1e-3)
    assert estimator.rate(READ) is None
    assert estimator.round_trip() == pytest.approx(300e6, rel=1e-3)


def test_an_idle_path_does_not_change_the_estimate():
    estimator = BandwidthEstimator()
    estimator.seed(read=1e9, write=1e9)
    for second in range(10):  # a block per second, because nobody asks for more
        begun, busy = float(second), estimator.begins(float(second), saturated=False)
        end = begun + 0.9
        estimator.completed(READ, BLOCK, end, begun=begun, busy_before=busy, saturated=False)
    assert estimator.rate(READ) == pytest.approx(1e9)


def test_a_path_that_slows_down_is_noticed_within_a_second():
    estimator = BandwidthEstimator()
    end = run(estimator, WRITE, 150e6, 30.0)
    end = run(estimator, WRITE, 50e6, 0.5, begin=end)
    assert (estimator.rate(WRITE) or 0) < 110e6
    run(estimator, WRITE, 50e6, 2.0, begin=end)
    assert 49e6 < (estimator.rate(WRITE) or 0) < 60e6


def test_a_path_that_reads_and_writes_at_once_divides_its_time():
    estimator = BandwidthEstimator()
    now = 0.0
    begun = {way: (now, estimator.begins(now, saturated=way is WRITE)) for way in (READ, WRITE)}
    for _ in range(200):  # half-duplex: 4 ms for a block that is read, 12 for one that is written
        for way, seconds in ((READ, 0.004), (WRITE, 0.012)):
            now += seconds
            since, busy = begun[way]
            estimator.completed(way, BLOCK, now, begun=since, busy_before=busy, saturated=False)
            begun[way] = (now, estimator.begins(now, saturated=True))
    assert estimator.rate(READ) == pytest.approx(BLOCK / 0.004, rel=0.02)
    assert estimator.rate(WRITE) == pytest.approx(BLOCK / 0.012, rel=0.02)


def test_a_burst_whose_completions_arrive_together_counts_from_its_begin():
    estimator, depth = BandwidthEstimator(), 4
    for burst in range(10):  # 16 MiB in 8 ms, 100 ms apart; completed within 0.1 ms
        now = 0.1 * burst
        busy = [estimator.begins(now, saturated=slot + 1 == depth) for slot in range(depth)]
        for slot, before in enumerate(busy):
            end = now + 0.008 + 0.00001 * slot
            estimator.completed(READ, BLOCK, end, begun=now, busy_before=before, saturated=False)
    assert estimator.rate(READ) == pytest.approx(depth * BLOCK / 0.008, rel=0.01)


# ---------------------------------------------------------------------- sums of a run
def test_the_sums_of_a_run_have_the_time_in_which_each_direction_was_full():
    estimator = BandwidthEstimator()
    for block in range(101):  # both at once: a path that does both has the sum
        estimator.add_sustained(WRITE, 100, float(block), full=True, continues=True)
        estimator.add_sustained(READ, 200, block + 0.5, full=True, continues=True)
    assert estimator.sustained(WRITE) == Transferred(10000, 100.0)
    assert estimator.sustained(READ) == Transferred(20000, 100.0)


def test_pauses_and_single_blocks_do_not_count_for_the_sums():
    estimator = BandwidthEstimator()
    for block in range(10):  # one now and then
        estimator.add_sustained(READ, 100, float(block), full=False, continues=False)
    estimator.add_sustained(READ, 100, 20.0, full=True, continues=False)  # the end of a burst
    estimator.add_sustained(READ, 100, 30.0, full=True, continues=True)
    assert estimator.sustained(READ) == Transferred(0, 0.0)
    estimator.add_sustained(READ, 100, 31.0, full=True, continues=True)
    assert estimator.sustained(READ) == Transferred(100, 1.0)
