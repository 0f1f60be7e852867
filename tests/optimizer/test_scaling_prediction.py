"""Predicting how gradients are scaled between backward and `step()`."""

from __future__ import annotations

import pytest
import torch

from offload_strategy.optimizer.gradients.recorded_edits import Edit, EditHistory
from offload_strategy.optimizer.overlap.overlap_modes import ScalingPrediction


def scaled(factor: float) -> EditHistory:
    op = torch.ops.aten.mul_.Tensor
    return EditHistory((Edit.of(op, [factor], torch.float32, torch.device("cpu")),))


def after(*scalings: float | None) -> ScalingPrediction:
    prediction = ScalingPrediction()
    for scaling in scalings:
        prediction.record(None if scaling is None else scaled(scaling))
    return prediction


@pytest.mark.parametrize(
    ("scalings", "predicted"),
    [
        ((), 1.0),
        ((0.5,), 0.5),
        ((1.0, 1.0, 0.5, 0.5), 0.5),
        ((1.0, 1.0, 0.83), 1.0),
        ((1.0, 1.0, 0.83, 0.4, 0.7), 1.0),
        ((1.0, 1.0, None), 1.0),
        ((*[1 / 1024] * 20, 1 / 2048), 1 / 1024),
        ((*[1 / 1024] * 20, 1 / 2048, 1 / 2048), 1 / 2048),
    ],
)
def test_the_latest_scaling_that_was_repeated_is_predicted(
    scalings: tuple[float | None, ...], predicted: float
) -> None:
    assert after(*scalings).predicted == scaled(predicted)


@pytest.mark.parametrize(
    ("scalings", "worthwhile"),
    [
        ((), True),
        ((None,), False),
        ((0.5,), False),
        ((0.5, 0.5, 0.5), False),
        ((0.5, 0.5, 0.5, 0.5), True),
        (tuple(0.1 + number / 100 for number in range(50)), False),
        ((*(0.1 + number / 100 for number in range(50)), *[1.0] * 17), True),
        *(
            ((*[1.0] * 40, *(0.5 + n / 100 for n in range(misses))), misses < 5)
            for misses in range(6)
        ),
    ],
)
def test_predicting_is_worthwhile_while_three_of_four_of_the_last_steps_were_right(
    scalings: tuple[float | None, ...], worthwhile: bool
) -> None:
    assert after(*scalings).is_worthwhile is worthwhile
