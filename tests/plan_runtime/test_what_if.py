"""One change at a time, beside a step that was built with the change from the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.predicted_and_measured import PredictedStep, best_changes
from offload_strategy.plan_runtime.profile import PathRates, Profile, Update
from tests.plan_runtime.profiles import stack

UPDATE = Update(ready_at=9.0, seconds=2.0, read_bytes=600, written_bytes=600)


def seconds_by_change(step: PredictedStep) -> dict[str, float]:
    return {change.what: change.after_seconds for change in best_changes(step)}


def of(found: dict[str, float], words: str) -> float:
    (seconds,) = (seconds for what, seconds in found.items() if words in what)
    return seconds


def in_half_the_time(profile: Profile) -> Profile:
    return replace(
        profile,
        forward_seconds=profile.forward_seconds / 2,
        step_seconds=profile.step_seconds / 2,
        tensors=tuple(
            replace(one, uses=(one.uses[0] / 2, one.uses[1] / 2)) for one in profile.tensors
        ),
        updates=tuple(
            replace(one, ready_at=one.ready_at / 2, seconds=one.seconds / 2)
            for one in profile.updates
        ),
    )


def test_each_change_is_the_replay_of_the_step_with_it() -> None:
    profile = stack(10, path=30.0, updates=(UPDATE,))
    step = PredictedStep(profile, range(10))
    found = seconds_by_change(step)
    faster = replace(profile, paths=(PathRates("disk", 60.0, 60.0),))
    assert of(found, "twice as fast, or twice as many") == pytest.approx(
        PredictedStep(faster, range(10)).figures()["step"]
    )
    assert of(found, "a device") == pytest.approx(
        PredictedStep(in_half_the_time(profile), range(10)).figures()["step"]
    )
    without = replace(profile, updates=(replace(UPDATE, read_bytes=0, written_bytes=0),))
    assert of(found, "a dram tier of 600 B") == pytest.approx(
        PredictedStep(without, range(10)).figures()["step"]
    )
    assert of(found, "micro-batches") == pytest.approx(
        PredictedStep(profile, range(10), passes=2).figures()["step"] / 2
    )


def test_the_best_change_comes_first_and_each_shortens_the_step() -> None:
    step = PredictedStep(stack(10, path=30.0, updates=(UPDATE,)), range(10))
    seconds = [change.after_seconds for change in best_changes(step)]
    assert seconds == sorted(seconds)
    before = {change.before_seconds for change in best_changes(step)}
    assert before == {step.figures()["step"]}
    assert seconds[-1] < step.figures()["step"]


def test_what_computation_hides_is_not_worth_a_faster_path() -> None:
    found = seconds_by_change(PredictedStep(stack(5, path=1000.0), range(5)))
    assert list(found.values()) == [pytest.approx(7.5)]
    assert "a device" in next(iter(found))


def test_with_more_memory_what_is_saved_last_stays() -> None:
    profile = stack(10, path=1000.0, io_overhead=0.005)
    found = seconds_by_change(PredictedStep(profile, range(10)))
    # 250 B are a quarter of what leaves: the last two tensors stay, and half of the third would.
    assert of(found, "250 B more memory") == pytest.approx(
        PredictedStep(profile, range(7)).figures()["step"]
    )


def test_a_larger_limit_leaves_less_to_a_slow_path() -> None:
    step = PredictedStep(stack(20, path=60.0), limit=800)
    kept = step.plan.moved_bytes // 4
    more = replace(step, limit=800 + kept)
    assert of(seconds_by_change(step), "more memory") == more.figures()["step"]


def test_without_a_path_only_the_device_counts() -> None:
    assert list(seconds_by_change(PredictedStep(stack(5, paths=()), range(5)))) == [
        "a device that computes twice as fast"
    ]
