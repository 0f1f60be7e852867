from __future__ import annotations

import pytest

from offload_strategy.telemetry import Direction
from offload_strategy.transfer import Bandwidth
from offload_strategy.units import MiB

READ, WRITE = Direction.READ, Direction.WRITE


def run(
    bandwidth: Bandwidth, direction: Direction, rate: float, seconds: float, begin: float = 0.0
) -> float:
    """Blocks that complete at a steady rate; returns when the last did."""
    now = begin
    while now < begin + seconds:
        now += 4 * MiB / rate
        bandwidth.completed(direction, 4 * MiB, now, saturated=True)
    return now


def test_nothing_is_known_at_first() -> None:
    assert Bandwidth().rate(READ) is None
    assert Bandwidth().round_trip() is None


def test_a_busy_path_tells_its_rate() -> None:
    bandwidth = Bandwidth()
    run(bandwidth, WRITE, 300e6, 1.0)
    assert bandwidth.rate(WRITE) == pytest.approx(300e6, rel=1e-3)
    assert bandwidth.rate(READ) is None
    assert bandwidth.round_trip() == pytest.approx(300e6, rel=1e-3)


def test_an_idle_path_tells_nothing() -> None:
    bandwidth = Bandwidth()
    bandwidth.seed(read=1e9, write=1e9)
    for second in range(10):  # a block a second, because nobody asks for more
        bandwidth.completed(READ, 4 * MiB, float(second), saturated=False)
    assert bandwidth.rate(READ) == pytest.approx(1e9)


def test_the_pause_between_two_bursts_does_not_count() -> None:
    bandwidth = Bandwidth()
    end = run(bandwidth, READ, 300e6, 0.5)
    bandwidth.completed(READ, 4 * MiB, end + 0.01, saturated=False)
    run(bandwidth, READ, 300e6, 0.5, begin=end + 100)
    assert bandwidth.rate(READ) == pytest.approx(300e6, rel=1e-3)


def test_a_path_that_slows_down_is_noticed_within_a_second() -> None:
    bandwidth = Bandwidth()
    end = run(bandwidth, WRITE, 150e6, 30.0)
    end = run(bandwidth, WRITE, 50e6, 0.5, begin=end)
    slow = bandwidth.rate(WRITE)
    assert slow is not None
    assert slow < 110e6
    run(bandwidth, WRITE, 50e6, 2.0, begin=end)
    slow = bandwidth.rate(WRITE)
    assert slow is not None
    assert slow < 60e6


def test_a_round_trip_costs_the_time_of_both_ways() -> None:
    bandwidth = Bandwidth()
    bandwidth.seed(read=3e9, write=1e9)
    # 1/3 + 1 seconds for a GB there and back: as if each way went at 1.5 GB/s.
    assert bandwidth.round_trip() == pytest.approx(1.5e9)


def test_a_path_that_does_both_at_once_shares_its_time() -> None:
    bandwidth = Bandwidth()
    now = 0.0
    for _ in range(200):  # half-duplex: 4 ms for a block that is read, 12 for one that is written
        now += 0.004
        bandwidth.completed(READ, 4 * MiB, now, saturated=True)
        now += 0.012
        bandwidth.completed(WRITE, 4 * MiB, now, saturated=True)
    assert bandwidth.rate(READ) == pytest.approx(4 * MiB / 0.004, rel=0.02)
    assert bandwidth.rate(WRITE) == pytest.approx(4 * MiB / 0.012, rel=0.02)
