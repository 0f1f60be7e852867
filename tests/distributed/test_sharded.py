"""FSDP2: the numbers are those of plain FSDP2, and so are the states, which are DTensors."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.data_parallel_runs import STEPS
from tests.distributed.ranks import run_ranks

_RUNS = "tests.distributed.sharded_runs"


# One test for what the ranks did: pytest-xdist would run them again for others.
def test_sharded_training_gives_what_it_gives_without_offload(tmp_path: Path) -> None:
    ranks = run_ranks(f"{_RUNS}:two_ranks", tmp_path)
    for rank in ranks:
        runs = rank["against plain"]
        assert len(runs) == 8
        assert [run["case"] for run in runs if run["differs"]] == []
        for run in runs:
            assert run["activations"] > 0
            case, overlap = run["case"]
            assert overlap != "commit" or "clip" in case or run["ahead"] == STEPS
            if "SGD" not in case:
                assert run["kinds"] == ["DTensor"]
                assert run["optimizer"] > 0

        # Layers that ranks compute together are updated part by part.
        for run in rank["tensor parallel"]:
            assert run["differs"] == []
            assert run["sharded"] == 4  # two weights and their biases
            assert run["optimizer"] > 0
            assert run["activations"] > 0

        policy, streamed, together = rank["refusals"]
        assert "CPUOffloadPolicy" in policy
        assert "parameters.enabled" in streamed
        assert "does not update every element by itself" in together

    # A checkpoint of two ranks goes on with one and with four.
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        for rank in run_ranks(f"{_RUNS}:second_half", place, size, source=str(tmp_path)):
            assert [run["case"] for run in rank if run["differs"]] == []
            assert all(run["optimizer"] > 0 for run in rank)
            # What ours saved is what plain training saved.
            assert len({str(run["losses"]) for run in rank}) == 1
