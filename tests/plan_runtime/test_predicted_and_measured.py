"""What was predicted beside what happened, with numbers that are easy to reckon by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.predicted_and_measured import (
    ComparedFigure,
    PredictedStep,
    compare_prediction,
)
from offload_strategy.plan_runtime.profile import PathRates, Update
from offload_strategy.plan_runtime.replay import replay
from tests.plan_runtime.profiles import stack

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


def test_each_part_is_told_with_its_own_ratio() -> None:
    observed = FIGURES | {"step": 3.0, "waiting for reads": 1.5, "waiting for room": 0.5}
    del observed["peak of memory"]
    same = compare_prediction(FIGURES, FIGURES)
    assert [part.ratio for part in same.parts] == [1.0] * 9, "0 of 0 too"
    found = compare_prediction(
        FIGURES,
        {**observed, "waiting for weights": 0.1},
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
    assert found.part("waiting for weights").predicted is None
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
        assert found["read in a step"] == found["written in a step"] == 100 * len(leaving)
        assert found["step"] == pytest.approx(15.0), "all of it is hidden"
        assert found["computing"] == pytest.approx(15.0)
        assert (found["peak of memory"] < 500) == bool(leaving)


def test_a_path_that_is_too_slow_is_waited_for() -> None:
    profile = stack(10, path=30.0)
    parts = PredictedStep(profile, leaving=range(10)).figures()
    assert parts["waiting for reads"] > 0
    waits = parts["waiting for reads"] + parts["waiting for room"] + parts["waiting for updates"]
    assert parts["step"] == pytest.approx(parts["computing"] + parts["updates"] + waits)
    # A faster path is waited for less.
    faster = replace(profile, paths=(PathRates("disk", 500.0, 500.0),))
    assert PredictedStep(faster, leaving=range(10)).figures()["step"] < parts["step"]


def test_a_limit_of_memory_has_a_plan_of_its_own() -> None:
    found = PredictedStep(stack(20, path=120.0), limit=800).figures()
    assert found["peak of memory"] <= 800
    assert found["written in a step"] == found["read in a step"] > 0


@pytest.mark.parametrize("path", [10.0, 1000.0])  # of the first, updates wait for bytes as well
def test_updates_that_share_the_cores_are_told_apart_from_waiting_for_them(path: float) -> None:
    update = Update(ready_at=9.0, seconds=2.0, read_bytes=100, written_bytes=300)
    profile = stack(3, path=path, updates=(update, update), shared_cores=True)
    found = PredictedStep(profile).figures()
    assert found["updates"] == pytest.approx(4.0)
    assert found["step"] == pytest.approx(replay(profile).step_seconds)
    assert found["step"] == pytest.approx(
        found["computing"] + found["updates"] + found["waiting for updates"]
    )
    assert (found["read in a step"], found["written in a step"]) == (200, 600)


def test_passes_of_a_step_add_up_and_updates_come_with_the_last() -> None:
    update = Update(ready_at=9.0, seconds=2.0, read_bytes=100, written_bytes=100)
    profile = stack(3, path=1000.0, updates=(update,), shared_cores=True)
    one, three = (PredictedStep(profile, [0], passes=passes).figures() for passes in (1, 3))
    assert three["computing"] == pytest.approx(3 * one["computing"])
    assert three["updates"] == pytest.approx(one["updates"])
    assert three["written in a step"] == 2 * 100 + one["written in a step"]
    assert three["peak of memory"] == one["peak of memory"]


def test_what_has_no_path_does_not_leave() -> None:
    found = PredictedStep(stack(5, paths=()), leaving=range(5)).figures()
    assert found["step"] == pytest.approx(15.0)
    assert found["written in a step"] == 0
