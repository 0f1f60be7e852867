"""FSDP2: the numbers are those of plain FSDP2, and so are the states, which are DTensors."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.data_parallel_runs import STEPS
from tests.distributed.ranks import run_ranks

_RUNS = "tests.distributed.sharded_runs"


def test_sharded_training_gives_what_it_gives_without_offload(tmp_path: Path) -> None:
    for rank in run_ranks(f"{_RUNS}:against_plain", tmp_path):
        assert len(rank) == 19
        assert [run["case"] for run in rank if run["differs"]] == []
        for run in rank:
            assert run["activations"] > 0
            case, overlap = run["case"]
            assert overlap != "commit" or "clip" in case or run["ahead"] == STEPS
            if "SGD" not in run["case"][0]:
                assert run["kinds"] == ["DTensor"]
                assert run["optimizer"] > 0


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    run_ranks(f"{_RUNS}:first_half", saved)
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        for rank in run_ranks(f"{_RUNS}:second_half", place, size, source=str(saved)):
            assert len(rank) == 4
            assert [run["case"] for run in rank if run["differs"]] == []
            assert all(run["optimizer"] > 0 for run in rank)
            # What ours saved is what plain training saved.
            assert len({str(run["losses"]) for run in rank}) == 1


def test_layers_that_ranks_compute_together_are_updated_part_by_part(tmp_path: Path) -> None:
    for rank in run_ranks(f"{_RUNS}:tensor_parallel", tmp_path):
        assert [run["case"] for run in rank if run["differs"]] == []
        for run in rank:
            assert run["sharded"] == 4  # two weights and their biases
            assert run["optimizer"] > 0
            assert run["activations"] > 0


def test_what_would_not_work_with_shards_is_refused(tmp_path: Path) -> None:
    for policy, streamed, together in run_ranks(f"{_RUNS}:refusals", tmp_path):
        assert "CPUOffloadPolicy" in policy
        assert "parameters.enabled" in streamed
        assert "does not update every element by itself" in together
