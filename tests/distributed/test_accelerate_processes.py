"""Accelerate with several processes: numbers and checkpoints are those of plain training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

_RUNS = "tests.distributed.accelerate_runs"


@pytest.mark.parametrize("sharded", [False, True], ids=["data-parallel", "sharded"])
def test_a_loop_with_accelerate_gives_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, sharded: bool
) -> None:
    for rank in run_ranks(f"{_RUNS}:against_plain", tmp_path, sharded=sharded):
        assert len(rank) == 7
        assert [run["case"] for run in rank if run["differs"]] == []
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in rank)
