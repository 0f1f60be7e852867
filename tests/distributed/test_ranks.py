"""Several ranks: numbers and checkpoints of plain training; each has its part of the states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.data_parallel_runs import STEPS
from tests.distributed.ranks import run_ranks


def test_every_way_gives_what_plain_data_parallel_training_gives(tmp_path: Path) -> None:
    ranks = run_ranks("tests.distributed.data_parallel_runs:against_plain", tmp_path)
    for rank in ranks:
        assert rank
        assert [run["case"] for run in rank if run["differs"]] == []
        for run in rank:
            assert (run["activations"] > 0) is (run["case"].get("order") != "optimizer alone")
        for run in rank:
            case = run["case"]
            if "blocks" in case:
                continue
            whole_pass = {"find_unused_parameters", "static_graph"} & case.keys()
            # Gradients are used as soon as their bucket is reduced, where that can be known.
            expected = not whole_pass and case["overlap"] != "off"
            assert (run["early"] > 0) is expected, (case, run["early"])
        whole = {_name(run): run for run in rank if not run["case"]["sharding"]}
        compared = [run for run in rank if run["case"]["sharding"] and _name(run) in whole]
        assert compared
        for run in compared:
            if "loop" in run["case"]:
                continue  # what ran ahead in vain was written as far as the disk got
            for verb in ("optimizer", "optimizer_read"):
                share = run[verb] / whole[_name(run)][verb]
                assert 0.45 < share < 0.55, (run["case"], verb, share)


def _name(run: dict[str, Any]) -> str:
    return str({key: value for key, value in run["case"].items() if key != "sharding"})


# ---------------------------------------------------------------------- FSDP2
# One test for what the ranks did: pytest-xdist would run them again for others.
def test_sharded_training_gives_what_it_gives_without_offload(tmp_path: Path) -> None:
    ranks = run_ranks("tests.distributed.sharded_runs:two_ranks", tmp_path)
    for rank in ranks:
        runs = rank["against plain"]
        assert len(runs) == 16  # without streamed weights, and with them
        assert [run["weights"] > 0 for run in runs] == [False, True] * 8
        assert [run["case"] for run in runs if run["differs"]] == []
        # Gradients of streamed weights are used in backward, too, and not kept until step().
        eager = [run["optimizer"] for run in runs if run["case"][1] == "eager"]
        assert eager[::2] == eager[1::2]
        for run in runs:
            assert run["activations"] > 0
            case, overlap = run["case"]
            assert overlap != "commit" or "clip" in case or run["ahead"] == STEPS
            if "SGD" not in case:
                assert run["kinds"] == ["DTensor"]
                assert run["optimizer"] > 0

        assert [run["case"] for run in rank["loaded"] if run["differs"]] == []
        assert [run["weights"] > 0 for run in rank["loaded"]] == [False, True, True]

        # Layers that ranks compute together are updated part by part.
        for run in rank["tensor parallel"]:
            assert run["differs"] == []
            assert run["sharded"] == 4  # two weights and their biases
            assert run["optimizer"] > 0
            assert run["activations"] > 0

        policy, streamed, together = rank["refusals"]
        assert "CPUOffloadPolicy" in policy
        assert "tensor parallelism alone" in streamed
        assert "does not update every element by itself" in together

    # A checkpoint of two ranks goes on with one and with four.
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        where = "tests.distributed.sharded_runs:second_half"
        for rank in run_ranks(where, place, size, source=str(tmp_path)):
            assert [run["case"] for run in rank if run["differs"]] == []
            assert all(run["optimizer"] > 0 for run in rank)


# ---------------------------------------------------------------------- frameworks
def test_a_loop_with_accelerate_gives_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path,
) -> None:
    for kinds in run_ranks("tests.distributed.framework_runs:with_accelerate", tmp_path):
        for runs in kinds:  # data-parallel and sharded
            assert len(runs) == 4
            assert [run["case"] for run in runs if run["differs"]] == []
            assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in runs)
        assert [run["streamed"] > 0 for run in kinds[1][:3]] == [False, True, True]


def test_the_trainer_and_lora_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tier = tmp_path / "tier"
    tier.mkdir()
    for runs in run_ranks("tests.distributed.framework_runs:with_the_trainer", tmp_path):
        # From the start, and resumed by both from the files of both; with LoRA by ours from ours.
        assert len(runs) == (1 + 4) + (1 + 1)
        assert [run["case"] for run in runs if run["differs"]] == []
        offloaded = [run for run in runs if run["case"][1]]
        assert len(offloaded) == 3 + 2
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in offloaded)
    assert list(tier.iterdir()) == []


# ---------------------------------------------------------------------- Lightning
def test_two_processes_give_the_numbers_and_checkpoints_of_plain_training(tmp_path: Path) -> None:
    for rank, runs in enumerate(
        run_ranks("tests.distributed.framework_runs:with_lightning", tmp_path)
    ):
        whole, sharded, short = runs
        assert [len(whole), len(sharded), len(short)] == [5, 5 - rank, 2]
        # Among them that the file is the plain one, which goes on with other numbers of ranks.
        assert {run["class"] for run in whole + short} == {"SSDOffloadDataParallelStrategy"}
        assert {run["class"] for run in sharded} == {"SSDOffloadFSDPStrategy"}
        assert [run["streamed"] > 0 for run in sharded[:2]] == [False, True]
        for run in whole + sharded + short:
            assert run["differs"] == [], run["case"]
            assert run["optimizer"] > 0
            assert run["activations"] > 0


def test_fabric_with_two_devices_gives_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path,
) -> None:
    for runs in run_ranks("tests.distributed.framework_runs:with_fabric", tmp_path):
        assert len(runs) == 6
        assert {run["class"] for run in runs} == {"SSDOffloadDataParallelStrategy"}
        assert [[*run["case"], *run["differs"]] for run in runs if run["differs"]] == []
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in runs)
        assert [run["files"] for run in runs[2::3]] == [True, True]


# ---------------------------------------------------------------------- other numbers of ranks
def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    where = "tests.distributed.data_parallel_runs"
    assert run_ranks(f"{where}:save_half", tmp_path) == [True, True]
    for size in (1, 4):
        for rank in run_ranks(f"{where}:second_half", tmp_path, size):
            assert [run["differs"] for run in rank] == [[], []]
            assert all(rank[1][client] > 0 for client in ("activations", "optimizer"))
    assert list(tier.iterdir()) == []
