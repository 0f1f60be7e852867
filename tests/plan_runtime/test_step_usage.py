"""Bytes required from moment to moment, and booked time of paths."""

from __future__ import annotations

import random

from offload_strategy.plan_runtime.step_usage import MemoryCurve, Timeline
from tests.plan_runtime.profiles import stack


def level(curve: MemoryCurve, moment: float) -> int:
    """Bytes at a time."""
    return curve.levels[curve._cut(moment)]


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
