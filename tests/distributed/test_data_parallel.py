"""DDP: the numbers are those of plain DDP, and each rank has its part of the states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.ranks import run_ranks

_RUNS = "tests.distributed.data_parallel_runs"


def test_every_way_gives_what_plain_data_parallel_training_gives(tmp_path: Path) -> None:
    ranks = run_ranks(f"{_RUNS}:against_plain", tmp_path)
    for rank in ranks:
        assert rank
        assert [run["case"] for run in rank if run["differs"]] == []
        for run in rank:
            assert (run["activations"] > 0) is (run["case"].get("order") != "optimizer alone")
        for run in rank:
            case = run["case"]
            whole_pass = {"unused", "static_graph"} & case.keys() or case["overlap"] == "off"
            # Gradients are used as soon as their bucket is reduced, where that can be known.
            assert (run["early"] > 0) is (not whole_pass), (case, run["early"])
        whole = {_name(run): run for run in rank if not run["case"]["sharding"]}
        compared = [run for run in rank if run["case"]["sharding"] and _name(run) in whole]
        assert compared
        for run in compared:
            if "clip" in run["case"]:
                continue  # what ran ahead in vain was written as far as the disk got
            for verb in ("optimizer", "optimizer_read"):
                share = run[verb] / whole[_name(run)][verb]
                assert 0.45 < share < 0.55, (run["case"], verb, share)


def test_reentrant_checkpoints_give_what_they_give_without_offload(tmp_path: Path) -> None:
    """They run backward passes within the pass."""
    for rank in run_ranks("tests.distributed.reentrant_runs:against_plain", tmp_path):
        assert len(rank) == 5
        assert [run["case"] for run in rank if run["differs"]] == []
        assert all(run["optimizer"] > 0 for run in rank)


def _name(run: dict[str, Any]) -> str:
    return str({key: value for key, value in run["case"].items() if key != "sharding"})
