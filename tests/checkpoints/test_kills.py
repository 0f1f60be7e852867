"""Training that is killed at any moment goes on from its last checkpoint, to the very same end."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoints.kills import kills
from benchmarks.checkpoints.small import Job


@pytest.mark.slow
def test_killed_runs_end_with_the_parameters_of_an_uninterrupted_one(tmp_path: Path) -> None:
    job = Job("", "", steps=60, every=3)
    found, results = kills(tmp_path, 3, job, say=lambda text: None, seed=1)
    assert len(found) == 3
    for kill in found:
        assert kill.identical
        assert kill.left == ()
    # Whether a kill came within a save is chance: the benchmark has enough runs to tell.
    assert all(result.held for result in results if "within a save" not in result.name)
