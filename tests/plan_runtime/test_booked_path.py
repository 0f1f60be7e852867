"""Booking the time of a path."""

from __future__ import annotations

import random

from offload_strategy.plan_runtime.booked_path import BookedPath, Timeline
from offload_strategy.plan_runtime.profile import PathRates


def test_a_free_timeline_gives_the_first_and_the_last_seconds() -> None:
    line = Timeline()
    assert line.after(3.0, 2.0) == 5.0
    assert line.before(3.0, 2.0) == 1.0


def test_what_is_booked_is_gone_around_and_pieces_between_are_used() -> None:
    line = Timeline()
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
            assert abs(line.busy_seconds - total) < 1e-9
            assert line._begins == sorted(line._begins)
            assert all(
                end <= begin for end, begin in zip(line._ends, line._begins[1:], strict=False)
            )


def test_a_tensor_is_away_between_its_write_and_its_read() -> None:
    path = BookedPath(PathRates("disk", read=200.0, write=100.0))
    assert path.away(100, 0.0, 10.0) == (1.0, 9.5)
    assert path.away(100, 0.0, 1.5) is None
    path.book(0.0, 1.0, 9.5, 10.0)
    assert path.away(100, 0.0, 10.0) == (2.0, 9.0)


def test_directions_of_a_simplex_path_share_their_time() -> None:
    path = BookedPath(PathRates("disk", 100.0, 100.0, simplex=True))
    path.book(0.0, 1.0, 2.0, 3.0)
    assert path.away(100, 0.0, 4.0) == (2.0, 3.0) or path.away(100, 0.0, 4.0) is None
