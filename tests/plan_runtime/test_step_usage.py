"""Bytes required from moment to moment, and booked time of paths."""

from __future__ import annotations

import random

import pytest

from offload_strategy.plan_runtime.profile import PathRates
from offload_strategy.plan_runtime.step_usage import BookedPath, MemoryCurve, Timeline
from tests.plan_runtime.profiles import stack


def level(curve: MemoryCurve, moment: float) -> int:
    """Bytes at a time."""
    return curve.levels[curve._cut(moment)]


def test_a_stack_is_highest_where_backward_begins() -> None:
    profile = stack(4)
    curve = MemoryCurve(profile.tensors, profile.step_seconds, ((0.0, 50),))
    assert curve.peak_bytes == 450
    assert profile.peak_bytes == 400
    assert level(curve, 1.4) == 150


def test_relief_counts_only_what_is_above_the_limit() -> None:
    profile = stack(2)  # 100 from 1 s, 200 from 2 s to 4 s, 100 to 6 s
    curve = MemoryCurve(profile.tensors, profile.step_seconds)
    assert curve.relief(1.0, 6.0, 100, limit=150) == pytest.approx(50 * 2)
    assert curve.relief(1.0, 6.0, 30, limit=150) == pytest.approx(30 * 2)
    assert curve.relief(3.0, 6.0, 100, limit=0) == pytest.approx(100 * 3)
    assert curve.relief(0.0, 1.0, 100, limit=0) == 0


def test_since_when_there_is_room() -> None:
    profile = stack(2)
    curve = MemoryCurve(profile.tensors, profile.step_seconds)
    assert [curve.since(1.0, 6.0, nbytes) for nbytes in (100, 50, 500)] == [4.0, 6.0, 1.0]


def test_levels_are_those_of_adding_up_moment_by_moment() -> None:
    chance = random.Random(1)
    for _ in range(100):
        spans = [
            (chance.uniform(0, 10), chance.uniform(0, 10), chance.randint(1, 9)) for _ in range(8)
        ]
        curve = MemoryCurve((), 10.0)
        for begin, length, nbytes in spans:
            curve.add(begin, begin + length, nbytes)
        for moment in (chance.uniform(0, 10) for _ in range(20)):
            wanted = sum(
                nbytes for begin, length, nbytes in spans if begin <= moment < begin + length
            )
            assert level(curve, moment) == wanted


def test_what_is_booked_is_gone_around_and_pieces_between_are_used() -> None:
    line = Timeline()
    assert line.after(3.0, 2.0) == 5.0
    assert line.before(3.0, 2.0) == 1.0
    line.book(2.0, 4.0)
    line.book(6.0, 8.0)
    assert line.after(0.0, 2.0) == 2.0
    assert line.after(1.0, 2.0) == 5.0, "one second before the booked ones, one after"
    assert line.after(3.0, 3.0) == 9.0
    assert line.before(9.0, 2.0) == 5.0
    assert line.before(7.0, 1.0) == 5.0
    assert line.before(4.0, 1.0) == 1.0


def test_any_bookings_take_exactly_the_seconds_they_need() -> None:
    chance = random.Random(0)
    for _ in range(200):
        line, total = Timeline(), 0.0
        for _ in range(30):
            at, seconds = chance.uniform(0, 50), chance.uniform(0.1, 3)
            if chance.random() < 0.5:
                begin, end = at, line.after(at, seconds)
            else:
                begin, end = line.before(at, seconds), at
            line.book(begin, end)
            total += seconds
            booked = zip(line._begins, line._ends, strict=True)
            assert abs(sum(end - begin for begin, end in booked) - total) < 1e-9
            assert line._begins == sorted(line._begins)
            assert all(
                end <= begin for end, begin in zip(line._ends, line._begins[1:], strict=False)
            )


def test_a_tensor_is_written_and_read_in_time() -> None:
    path = BookedPath(PathRates("disk", read=200.0, write=100.0))
    assert (path.written(100, 0.0), path.read_from(100, 10.0)) == (1.0, 9.5)
    path.writes.book(0.0, 1.0)
    path.reads.book(9.5, 10.0)
    assert (path.written(100, 0.0), path.read_from(100, 10.0)) == (2.0, 9.0)
