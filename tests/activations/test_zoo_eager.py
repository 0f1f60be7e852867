"""Every model of the zoo: the same to the last bit, and nearly everything that is saved leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.activations.zoo import ZOO, build
from tests.activations.zoo.training import SCHEDULES, compare

pytest.importorskip("transformers")

CHECKPOINTING = {"no checkpointing": None, "reentrant": True, "non-reentrant": False}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_training_is_the_same(kind: str, schedule: str, checkpointing: str, disk: Path) -> None:
    reentrant = CHECKPOINTING[checkpointing]
    result = compare(lambda: build(kind, reentrant), kind, disk, [SCHEDULES[schedule]])
    result.assert_nearly_everything_left()
