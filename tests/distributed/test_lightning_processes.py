"""Lightning with several processes: numbers and checkpoints are those of the strategy "ddp"."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks

_RUNS = "tests.distributed.lightning_runs"


@pytest.mark.parametrize("family", ["lightning.pytorch", "pytorch_lightning"])
def test_two_processes_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, family: str
) -> None:
    for rank in run_ranks(f"{_RUNS}:against_plain", tmp_path, family=family):
        assert len(rank) == 6
        assert [run["case"] for run in rank if run["differs"]] == []
        assert {run["class"] for run in rank} == {"SSDOffloadDataParallelStrategy"}
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in rank)


@pytest.mark.parametrize("family", ["lightning.pytorch", "pytorch_lightning"])
def test_two_processes_with_a_sharded_model_give_what_they_give_without_offload(
    tmp_path: Path, family: str
) -> None:
    ranks = run_ranks(f"{_RUNS}:sharded_against_plain", tmp_path, family=family)
    assert [len(rank) for rank in ranks] == [6, 5]
    for rank in ranks:
        assert [run["case"] for run in rank if run["differs"]] == []
        assert {run["class"] for run in rank} == {"SSDOffloadFSDPStrategy"}
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in rank)
