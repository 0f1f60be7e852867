from __future__ import annotations

import pytest

from offload_strategy.io.bandwidth.estimator import Bandwidth
from offload_strategy.telemetry import Direction
from offload_strategy.units import MiB

READ, WRITE = Direction.READ, Direction.WRITE


def run(
    bandwidth: Bandwidth, direction: Direction, rate: float, seconds: float, begin: float = 0.0
) -> float:
    """Blocks that complete at a steady rate, one at a time; returns when the last did."""
    now = begin
    while now < begin + seconds:
        begun, mark = now, bandwidth.begins(now, saturated=True)
        now += 4 * MiB / rate
        bandwidth.completed(direction, 4 * MiB, now, begun=begun, mark=mark, saturated=False)
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
        begun, mark = float(second), bandwidth.begins(float(second), saturated=False)
        bandwidth.completed(READ, 4 * MiB, begun + 0.9, begun=begun, mark=mark, saturated=False)
    assert bandwidth.rate(READ) == pytest.approx(1e9)


def test_the_pause_between_two_bursts_does_not_count() -> None:
    bandwidth = Bandwidth()
    end = run(bandwidth, READ, 300e6, 0.5)
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
    begun = {way: (now, bandwidth.begins(now, saturated=way is WRITE)) for way in (READ, WRITE)}
    for _ in range(200):  # half-duplex: 4 ms for a block that is read, 12 for one that is written
        for way, seconds in ((READ, 0.004), (WRITE, 0.012)):
            now += seconds
            since, mark = begun[way]
            bandwidth.completed(way, 4 * MiB, now, begun=since, mark=mark, saturated=False)
            begun[way] = (now, bandwidth.begins(now, saturated=True))
    assert bandwidth.rate(READ) == pytest.approx(4 * MiB / 0.004, rel=0.02)
    assert bandwidth.rate(WRITE) == pytest.approx(4 * MiB / 0.012, rel=0.02)


def test_a_burst_that_is_noticed_all_at_once_counts_from_when_it_began() -> None:
    bandwidth, depth = Bandwidth(), 4
    for burst in range(10):  # 16 MiB in 8 ms, 100 ms apart; threads tell of it within 0.1 ms
        now = 0.1 * burst
        marks = [bandwidth.begins(now, saturated=place + 1 == depth) for place in range(depth)]
        for place, mark in enumerate(marks):
            end = now + 0.008 + 0.00001 * place
            bandwidth.completed(READ, 4 * MiB, end, begun=now, mark=mark, saturated=False)
    assert bandwidth.rate(READ) == pytest.approx(depth * 4 * MiB / 0.008, rel=0.01)


def test_what_is_left_when_others_are_over_counts_as_far_as_the_path_was_busy() -> None:
    bandwidth = Bandwidth()
    marks = [bandwidth.begins(0.0, saturated=False), bandwidth.begins(0.0, saturated=True)]
    bandwidth.completed(READ, 4 * MiB, 0.01, begun=0.0, mark=marks[0], saturated=False)
    # Alone for as long again: half of it moved while the path was busy.
    bandwidth.completed(READ, 4 * MiB, 0.02, begun=0.0, mark=marks[1], saturated=False)
    assert bandwidth.rate(READ) == pytest.approx(6 * MiB / 0.01)
