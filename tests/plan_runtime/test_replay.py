"""Steps that are replayed, predicted and changed, beside what can be reckoned by hand."""

import random
from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.lifetime_plan import LifetimePlan, PlannedMove, plan_lifetimes
from offload_strategy.plan_runtime.predicted_and_measured import (
    ComparedFigure,
    PredictedStep,
    best_changes,
    compare_prediction,
)
from offload_strategy.plan_runtime.profile import PathRates, Update
from offload_strategy.plan_runtime.replay import replay
from tests.plan_runtime.profiles import random_step, stack

UPDATE = Update(ready_at=9.0, seconds=2.0, read_bytes=600, written_bytes=600)


def all_leave(profile, limit=10**6):
    """A plan by which every tensor leaves at once, and is fetched when it is needed."""
    moves = tuple(
        PlannedMove(number, t.name, t.nbytes, "disk", t.uses[0], t.uses[0], t.uses[1], t.uses[1])
        for number, t in enumerate(profile.tensors)
    )
    return LifetimePlan(limit, limit, profile.peak_bytes, moves)


def updates(count, seconds, nbytes):
    return tuple(Update(4.0 + number, seconds, nbytes, nbytes) for number in range(count))


def predicted(profile, *leaving, **more):
    return PredictedStep(profile, *leaving, **more).figures()


# ---------------------------------------------------------------------- replays
def test_without_moves_a_step_is_as_long_as_it_computes():
    found = replay(stack(5))
    assert (found.step_seconds, found.peak_bytes) == (pytest.approx(15.0), 500)
    assert sum(found.stalls.values()) == 0


def test_what_is_hidden_costs_nothing_and_stays_within_the_limit():
    profile = stack(20, path=120.0)
    plan = plan_lifetimes(profile, 800)
    found = replay(profile, plan)
    assert plan.hidden
    assert found.step_seconds == pytest.approx(profile.step_seconds)
    assert found.peak_bytes <= 800
    assert found.lanes["disk write"].nbytes == found.lanes["disk read"].nbytes == plan.moved_bytes
    # Bytes that cost computing time make it longer.
    found = replay(replace(profile, io_overhead=0.001), plan)
    longer = 0.001 * 2 * plan.moved_bytes
    assert found.step_seconds == pytest.approx(profile.step_seconds + longer, rel=0.01)


def test_what_is_fetched_too_late_is_waited_for_or_handed_back_while_it_is_still_written():
    profile = stack(4, path=100.0)  # a read takes 1 s
    found = replay(profile, all_leave(profile))
    assert (found.stalls["reads"], found.step_seconds) == (pytest.approx(4.0), pytest.approx(16.0))
    profile = stack(2, path=20.0)  # a write takes 5 s, and the second layer is needed after 2 s
    found = replay(profile, all_leave(profile), steps=1)
    assert found.stalls["reads"] == pytest.approx(5.0), "the first, at 6 s, when it is just gone"
    assert found.lanes["disk read"].nbytes == 100


def test_where_memory_is_full_training_waits_for_the_path():
    profile = stack(4, path=50.0)  # a write takes 2 s, a layer makes as much in 1 s
    found = replay(profile, all_leave(profile, 200))
    assert found.peak_bytes <= 200
    # The writes end at 3, 5, 7 and 9 s; the fourth layer finds room at 5 s instead of 4.
    assert found.stalls["memory"] == pytest.approx(1.0)
    # Where everything else is beyond the limit, two tensors of 50 bytes have room all the same.
    profile = stack(4, nbytes=50, path=25.0, other_bytes=1000)
    found = replay(profile, all_leave(profile, 900))
    assert found.peak_bytes <= 1112
    assert found.stalls["memory"] == pytest.approx(1.0)
    profile = stack(40, seconds=0.001, path=100.0)  # with little to compute beside the moves
    plan = plan_lifetimes(profile, 1000)
    found = replay(profile, plan)
    assert found.peak_bytes <= 1000
    assert found.step_seconds == pytest.approx(2 * plan.moved_bytes / 100.0, rel=0.1)


@pytest.mark.parametrize(
    ("made", "shared_cores", "expected"),
    [
        (updates(8, 0.5, 10), False, pytest.approx(12.0)),  # the last one begins at 11 s
        ((Update(12.0, 0.5, 10, 10),), False, pytest.approx(12.5)),
        (updates(8, 0.5, 10), True, pytest.approx(16.0, abs=0.2)),
    ],
    ids=["hidden", "in step()", "on shared cores"],
)
def test_updates_hide_behind_backward_if_they_can(made, shared_cores, expected):
    assert replay(stack(4, updates=made, shared_cores=shared_cores)).step_seconds == expected


def test_updates_that_the_path_limits_are_waited_for():
    found = replay(stack(4, updates=updates(8, 0.01, 500)))  # 8 x 5 s in each direction
    assert found.stalls["updates"] > 20
    assert found.step_seconds == pytest.approx(4 + 8 * 5, rel=0.15)


def test_of_random_steps_none_hangs_and_none_is_faster_than_it_computes():
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


# ---------------------------------------------------------------------- what is predicted
@pytest.mark.parametrize("leaving", [[], [0, 1, 2]])
def test_what_leaves_moves_its_bytes_once_in_each_direction(leaving):
    found = predicted(stack(5, path=1000.0), leaving)
    assert found["read in a step"] == found["written in a step"] == 100 * len(leaving)
    assert found["step"] == pytest.approx(15.0), "all of it is hidden"
    assert found["computing"] == pytest.approx(15.0)
    assert (found["peak of memory"] < 500) == bool(leaving)
    nowhere = predicted(stack(5, paths=()), leaving)
    assert (nowhere["step"], nowhere["written in a step"]) == (pytest.approx(15.0), 0)


@pytest.mark.parametrize("path", [10.0, 1000.0])  # of the first, updates wait for bytes as well
def test_updates_that_share_the_cores_are_told_apart_from_waiting_for_them(path):
    update = Update(ready_at=9.0, seconds=2.0, read_bytes=100, written_bytes=300)
    profile = stack(3, path=path, updates=(update, update), shared_cores=True)
    found = predicted(profile)
    assert found["updates"] == pytest.approx(4.0)
    parts = found["computing"] + found["updates"] + found["waiting for updates"]
    assert found["step"] == pytest.approx(replay(profile).step_seconds) == pytest.approx(parts)
    assert (found["read in a step"], found["written in a step"]) == (200, 600)
    # Passes of a step add up, and updates come with the last.
    one, three = (predicted(profile, [0], passes=passes) for passes in (1, 3))
    assert three["computing"] == pytest.approx(3 * one["computing"])
    assert three["updates"] == pytest.approx(one["updates"])
    assert three["written in a step"] == 2 * 100 + one["written in a step"]
    assert three["peak of memory"] == one["peak of memory"]


# ---------------------------------------------------------------------- beside what happened
FIGURES = {
    "step": 2.0,
    "computing": 1.0,
    "updates": 0.25,
    "waiting for reads": 0.5,
    "waiting for room": 0.0,
    "waiting for updates": 0.25,
    "read in a step": 3e9,
    "written in a step": 4e9,
    "peak of memory": 5 << 30,
}


def test_each_part_is_told_with_its_own_ratio():
    same = compare_prediction(FIGURES, FIGURES, remarks=["A remark."])
    assert [part.ratio for part in same.parts] == [1.0] * 9, "0 of 0 too"
    observed = {"step": 3.0, "waiting for reads": 1.5, "waiting for room": 0.5}
    observed = FIGURES | observed | {"waiting for weights": 0.1}
    del observed["peak of memory"]
    paths = [
        ComparedFigure("/mnt/nvme0 read", 4e9, 3e9, "B/s", "predicted by the probe"),
        ComparedFigure("/mnt/nvme0 write", 2e9, None, "B/s"),
        ComparedFigure("/mnt/nvme1 write", None, 1e9, "B/s"),
    ]
    found = compare_prediction(FIGURES, observed, paths, ["A remark."])
    ratios = {part.part: part.ratio for part in found.parts}
    assert (ratios["step"], ratios["waiting for reads"]) == (pytest.approx(1.5), pytest.approx(3.0))
    assert ratios["/mnt/nvme0 read"] == pytest.approx(0.75)
    # Nothing was predicted of these, or nothing was seen: no ratio says so.
    for part in ("waiting for room", "waiting for weights", "/mnt/nvme0 write", "/mnt/nvme1 write"):
        assert ratios[part] is None
    assert ComparedFigure("what rounding leaves of 0", 3.5e-15, 0.035, "s").ratio is None
    assert found.part("waiting for weights").predicted is None
    with pytest.raises(KeyError):
        found.part("peak of memory")
    text = str(found)
    assert text.startswith("| part | predicted | observed | ratio | |\n|---|---|---|---|---|\n")
    assert "| step | 2.000 s | 3.000 s | 1.50 |  |" in text
    assert "| read in a step | 2.8 GiB | 2.8 GiB | 1.00 |  |" in text
    assert "| /mnt/nvme0 read | 4 GB/s | 3 GB/s | 0.75 | predicted by the probe |" in text
    assert text.endswith("\n\n- A remark.")


# ---------------------------------------------------------------------- one change at a time
def seconds_with_change(step):
    """How long a step would take with each change that shortens it, the best first."""
    return {change.what: change.after_seconds for change in best_changes(step)}


def of(found, words):
    (seconds,) = (seconds for what, seconds in found.items() if words in what)
    return seconds


def test_each_change_is_the_replay_of_the_step_with_it():
    profile = stack(10, path=30.0, updates=(UPDATE,))
    step = PredictedStep(profile, range(10))
    faster = replace(profile, paths=(PathRates("disk", 60.0, 60.0),))
    sooner = replace(UPDATE, ready_at=UPDATE.ready_at / 2, seconds=UPDATE.seconds / 2)
    on_faster_device = stack(10, seconds=0.5, path=30.0, updates=(sooner,))
    without = replace(profile, updates=(replace(UPDATE, read_bytes=0, written_bytes=0),))
    expected = {
        "twice as fast, or twice as many": predicted(faster, range(10))["step"],
        "a device": predicted(on_faster_device, range(10))["step"],
        "a dram tier of 600 B": predicted(without, range(10))["step"],
        "micro-batches": predicted(profile, range(10), passes=2)["step"] / 2,
    }
    found = seconds_with_change(step)
    for words, seconds in expected.items():
        assert of(found, words) == pytest.approx(seconds)
    assert list(found.values()) == sorted(found.values())
    before = step.figures()["step"]
    assert {change.before_seconds for change in best_changes(step)} == {before}
    assert max(found.values()) < before


@pytest.mark.parametrize("options", [{"path": 1000.0}, {"paths": ()}])
def test_where_computation_hides_all_moves_only_the_device_counts(options):
    found = seconds_with_change(PredictedStep(stack(5, **options), range(5)))
    assert found == {"a device that computes twice as fast": pytest.approx(7.5)}


def test_with_more_memory_what_is_saved_last_stays_and_a_larger_limit_leaves_less():
    profile = stack(10, path=1000.0, io_overhead=0.005)
    found = seconds_with_change(PredictedStep(profile, range(10)))
    # 250 B are a quarter of what leaves: the last two tensors stay, and half of the third would.
    assert of(found, "250 B more memory") == pytest.approx(predicted(profile, range(7))["step"])
    step = PredictedStep(stack(20, path=60.0), limit=800)
    more = replace(step, limit=800 + step.plan.moved_bytes // 4)
    assert of(seconds_with_change(step), "more memory") == more.figures()["step"]
