"""Guessing what will be done to gradients."""

from __future__ import annotations

import pytest

from offload_strategy.optimizer.overlap.commit import ScalingPrediction


def told(*scalings: float | None) -> ScalingPrediction[float]:
    prediction = ScalingPrediction(1.0)
    for scaling in scalings:
        prediction.record(scaling)
    return prediction


def test_nothing_is_expected_to_happen_at_first() -> None:
    prediction = told()
    assert prediction.predicted == 1.0
    assert prediction.is_worthwhile


def test_what_happened_last_is_expected_next() -> None:
    assert told(0.5).predicted == 0.5
    assert told(1.0, 1.0, 0.5, 0.5).predicted == 0.5


def test_an_exception_is_not_expected_again() -> None:
    assert told(1.0, 1.0, 0.83).predicted == 1.0
    assert told(1.0, 1.0, 0.83, 0.4, 0.7).predicted == 1.0


def test_what_cannot_be_told_changes_nothing_but_the_odds() -> None:
    assert told(1.0, 1.0, None).predicted == 1.0
    assert not told(None).is_worthwhile


def test_one_miss_at_the_start_stops_it_until_it_was_right_often_enough() -> None:
    prediction = told(0.5)
    right = 0
    while not prediction.is_worthwhile:
        prediction.record(0.5)
        right += 1
    assert right == 3


@pytest.mark.parametrize(("misses", "pays"), [(0, True), (1, True), (4, True), (5, False)])
def test_it_pays_while_three_of_four_are_right(misses: int, pays: bool) -> None:
    prediction = told(*[1.0] * 40)
    for number in range(misses):
        prediction.record(0.5 + number / 100)
    assert prediction.is_worthwhile is pays


def test_old_misses_are_forgotten() -> None:
    prediction = told(*[0.1 + number / 100 for number in range(50)])
    assert not prediction.is_worthwhile
    for _ in range(16):
        prediction.record(1.0)
    assert prediction.is_worthwhile


def test_a_loss_scale_that_doubles_costs_one_step() -> None:
    prediction = told(*[1 / 1024] * 20)
    prediction.record(1 / 2048)
    assert prediction.predicted == 1 / 1024  # it may have been an exception
    prediction.record(1 / 2048)
    assert prediction.predicted == 1 / 2048
    assert prediction.is_worthwhile
