"""Steps that are replayed, beside what can be reckoned by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, PlannedMove, plan_lifetimes
from offload_strategy.plan_runtime.profile import PathRates, Profile, Update
from offload_strategy.plan_runtime.replay import replay
from tests.plan_runtime.profiles import random_step, stack


def all_leave(profile: Profile, limit: int) -> LifetimePlan:
    """A plan by which every tensor leaves at once, and is fetched when it is needed."""
    moves = tuple(
        PlannedMove(number, t.name, t.nbytes, "disk", t.uses[0], t.uses[0], t.uses[1], t.uses[1])
        for number, t in enumerate(profile.tensors)
    )
    return LifetimePlan(limit, limit, profile.peak_bytes, moves)


def test_without_moves_a_step_is_as_long_as_it_computes() -> None:
    found = replay(stack(5))
    assert found.step_seconds == pytest.approx(15.0)
    assert found.peak_bytes == 500
    assert sum(found.stalls.values()) == 0


def test_what_is_hidden_costs_nothing_and_stays_within_the_limit() -> None:
    profile = stack(20, path=120.0)
    plan = plan_lifetimes(profile, 800)
    found = replay(profile, plan)
    assert plan.hidden
    assert found.step_seconds == pytest.approx(profile.step_seconds)
    assert found.peak_bytes <= 800
    assert found.lanes["disk write"].nbytes == plan.moved_bytes
    assert found.lanes["disk read"].nbytes == plan.moved_bytes


def test_what_is_fetched_too_late_is_waited_for() -> None:
    profile = stack(4, path=100.0)  # a read takes 1 s
    found = replay(profile, all_leave(profile, 10**6))
    assert found.stalls["reads"] == pytest.approx(4.0)
    assert found.step_seconds == pytest.approx(16.0)


def test_what_is_still_being_written_is_handed_back_from_memory() -> None:
    profile = stack(2, path=20.0)  # a write takes 5 s, and the second layer is needed after 2 s
    found = replay(profile, all_leave(profile, 10**6), steps=1)
    assert found.stalls["reads"] == pytest.approx(5.0), "the first, at 6 s, when it is just gone"
    assert "disk read" in found.lanes
    assert found.lanes["disk read"].nbytes == 100


def test_where_memory_is_full_training_waits_for_the_path() -> None:
    profile = stack(4, path=50.0)  # a write takes 2 s, a layer makes as much in 1 s
    found = replay(profile, all_leave(profile, 200))
    assert found.peak_bytes <= 200
    # The writes end at 3, 5, 7 and 9 s; the fourth layer finds room at 5 s instead of 4.
    assert found.stalls["memory"] == pytest.approx(1.0)


def test_a_path_bound_step_takes_what_its_bytes_take() -> None:
    profile = stack(40, seconds=0.001, path=100.0)
    plan = plan_lifetimes(profile, 1000)
    found = replay(profile, plan)
    moved = plan.moved_bytes
    assert found.peak_bytes <= 1000
    # Written in forward and read in backward, with little to compute beside it.
    assert found.step_seconds == pytest.approx(2 * moved / 100.0, rel=0.1)


def updates(count: int, seconds: float, nbytes: int) -> tuple[Update, ...]:
    return tuple(Update(4.0 + number, seconds, nbytes, nbytes) for number in range(count))


def test_updates_hide_behind_backward_unless_they_share_its_cores_or_come_last() -> None:
    hidden = stack(4, updates=updates(8, 0.5, 10))
    assert replay(hidden).step_seconds == pytest.approx(12.0), "the last one begins at 11 s"
    last = stack(4, updates=(Update(12.0, 0.5, 10, 10),))
    assert replay(last).step_seconds == pytest.approx(12.5)
    shared = replace(hidden, shared_cores=True)
    assert replay(shared).step_seconds == pytest.approx(16.0, abs=0.2)


def test_updates_that_the_path_limits_are_waited_for() -> None:
    profile = stack(4, updates=updates(8, 0.01, 500))  # 8 x 5 s in each direction
    found = replay(profile)
    assert found.stalls["updates"] > 20
    assert found.step_seconds == pytest.approx(4 + 8 * 5, rel=0.15)


def test_bytes_that_cost_computing_time_make_the_step_longer() -> None:
    profile = stack(20, path=500.0, io_overhead=0.001)
    plan = plan_lifetimes(profile, 800)
    found = replay(profile, plan)
    assert found.step_seconds == pytest.approx(
        profile.step_seconds + 0.001 * 2 * plan.moved_bytes, rel=0.01
    )


def test_of_random_steps_none_hangs_and_none_is_faster_than_it_computes() -> None:
    chance = random.Random(5)
    for _ in range(60):
        path = PathRates("disk", chance.uniform(5, 400), 100.0)
        profile = random_step(chance, paths=(path,), updates=updates(3, 0.1, 50))
        plan = plan_lifetimes(profile, int(profile.peak_bytes * chance.uniform(0.2, 1)))
        found = replay(profile, plan)
        assert found.step_seconds >= 20.0 - 1e-6
        assert sum(found.stalls.values()) <= found.step_seconds - found.computing_seconds + 1e-6
        # A transfer may end in the next step.
        longest = 300 / min(path.read, path.write)
        busiest = max(use.busy_share for use in found.lanes.values())
        assert busiest * found.step_seconds <= found.step_seconds + longest + 1e-6
