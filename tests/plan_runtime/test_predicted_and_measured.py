"""What was predicted beside what happened, with numbers that are easy to reckon by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.predicted_and_measured import (
    ComparedFigure,
    PredictedStep,
    StepFigures,
    compare_prediction,
)
from offload_strategy.plan_runtime.profile import PathRates, Update
from offload_strategy.plan_runtime.replay import replay
from tests.plan_runtime.profiles import stack

FIGURES = StepFigures(
    step_seconds=2.0,
    computing_seconds=1.0,
    update_seconds=0.25,
    read_wait_seconds=0.5,
    room_wait_seconds=0.0,
    update_wait_seconds=0.25,
    read_bytes=3e9,
    written_bytes=4e9,
    peak_bytes=5 << 30,
)


def test_each_part_is_told_with_its_own_ratio() -> None:
    observed = replace(
        FIGURES, step_seconds=3.0, read_wait_seconds=1.5, room_wait_seconds=0.5, peak_bytes=None
    )
    same = compare_prediction(FIGURES, FIGURES)
    assert [part.ratio for part in same.parts] == [1.0] * 9, "0 of 0 too"
    found = compare_prediction(
        FIGURES,
        replace(observed, weight_wait_seconds=0.1),
        [
            ComparedFigure("/mnt/nvme0 read", 4e9, 3e9, "B/s", "predicted by the probe"),
            ComparedFigure("/mnt/nvme0 write", 2e9, None, "B/s"),
            ComparedFigure("/mnt/nvme1 write", None, 1e9, "B/s"),
        ],
    )
    ratios = {part.part: part.ratio for part in found.parts}
    assert ratios["step"] == pytest.approx(1.5)
    assert ratios["waiting for reads"] == pytest.approx(3.0)
    assert ratios["/mnt/nvme0 read"] == pytest.approx(0.75)
    # Nothing was predicted of these, or nothing was seen: no ratio says so.
    assert ratios["waiting for room"] is None
    assert ratios["waiting for weights"] is None
    assert ratios["/mnt/nvme0 write"] is None
    assert ratios["/mnt/nvme1 write"] is None
    assert "peak of memory" not in ratios
    assert found.part("step").unit == "s"
    with pytest.raises(KeyError):
        found.part("peak of memory")


def test_what_rounding_leaves_of_nothing_has_no_ratio() -> None:
    assert ComparedFigure("waiting for reads", 3.5e-15, 0.035, "s").ratio is None


def test_it_prints_a_table() -> None:
    path = ComparedFigure("/mnt/nvme0 read", 4e9, 3e9, "B/s", "predicted by the probe")
    made = compare_prediction(FIGURES, FIGURES, [path], ["A remark."])
    text = str(made)
    assert text.startswith("| part | predicted | observed | ratio | |\n|---|---|---|---|---|\n")
    assert "| step | 2.000 s | 2.000 s | 1.00 |  |" in text
    assert "| read in a step | 2.8 GiB | 2.8 GiB | 1.00 |  |" in text
    assert "| /mnt/nvme0 read | 4 GB/s | 3 GB/s | 0.75 | predicted by the probe |" in text
    assert text.endswith("\n\n- A remark.")


# ---------------------------------------------------------------------- what is predicted
def test_what_leaves_moves_its_bytes_once_in_each_direction() -> None:
    for leaving in ([], [0, 1, 2]):
        found = PredictedStep(stack(5, path=1000.0), leaving=leaving).figures()
        assert found.read_bytes == found.written_bytes == 100 * len(leaving)
        assert found.step_seconds == pytest.approx(15.0), "all of it is hidden"
        assert found.computing_seconds == pytest.approx(15.0)
        assert found.peak_bytes is not None
        assert (found.peak_bytes < 500) == bool(leaving)


def test_a_path_that_is_too_slow_is_waited_for() -> None:
    profile = stack(10, path=30.0)
    parts = PredictedStep(profile, leaving=range(10)).figures()
    assert parts.read_wait_seconds > 0
    waits = parts.read_wait_seconds + parts.room_wait_seconds + parts.update_wait_seconds
    assert parts.step_seconds == pytest.approx(
        parts.computing_seconds + parts.update_seconds + waits
    )
    # A faster path is waited for less.
    faster = replace(profile, paths=(PathRates("disk", 500.0, 500.0),))
    assert PredictedStep(faster, leaving=range(10)).figures().step_seconds < parts.step_seconds


def test_a_limit_of_memory_has_a_plan_of_its_own() -> None:
    found = PredictedStep(stack(20, path=120.0), limit=800).figures()
    assert found.peak_bytes is not None
    assert found.peak_bytes <= 800
    assert found.written_bytes == found.read_bytes > 0


def test_updates_that_share_the_cores_are_told_apart_from_waiting_for_them() -> None:
    update = Update(ready_at=9.0, seconds=2.0, read_bytes=100, written_bytes=100)
    profile = stack(3, updates=(update, update), shared_cores=True)
    found = PredictedStep(profile).figures()
    assert found.update_seconds == pytest.approx(4.0)
    assert found.step_seconds == pytest.approx(replay(profile).step_seconds)
    assert found.step_seconds == pytest.approx(
        found.computing_seconds + found.update_seconds + found.update_wait_seconds
    )
    assert found.read_bytes == found.written_bytes == 200


def test_passes_of_a_step_add_up_and_updates_come_with_the_last() -> None:
    update = Update(ready_at=9.0, seconds=2.0, read_bytes=100, written_bytes=100)
    profile = stack(3, path=1000.0, updates=(update,), shared_cores=True)
    one, three = (PredictedStep(profile, [0], passes=passes).figures() for passes in (1, 3))
    assert three.computing_seconds == pytest.approx(3 * one.computing_seconds)
    assert three.update_seconds == pytest.approx(one.update_seconds)
    assert three.written_bytes == 2 * 100 + one.written_bytes
    assert three.peak_bytes == one.peak_bytes


def test_what_has_no_path_does_not_leave() -> None:
    found = PredictedStep(stack(5, paths=()), leaving=range(5)).figures()
    assert found.step_seconds == pytest.approx(15.0)
    assert found.written_bytes == 0
