"""Lightning with several processes: numbers and checkpoints are those of the strategy "ddp"."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import run_ranks


def test_two_processes_give_the_numbers_and_checkpoints_of_plain_training(tmp_path: Path) -> None:
    for rank, runs in enumerate(run_ranks("tests.distributed.lightning_runs:all_runs", tmp_path)):
        whole, sharded, short = runs
        assert [len(whole), len(sharded), len(short)] == [4, 5 - rank, 3]
        assert {run["class"] for run in whole + short} == {"SSDOffloadDataParallelStrategy"}
        assert {run["class"] for run in sharded} == {"SSDOffloadFSDPStrategy"}
        for run in whole + sharded + short:
            assert run["differs"] == [], run["case"]
            assert run["optimizer"] > 0
            assert run["activations"] > 0
