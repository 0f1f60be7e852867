"""Several ranks: numbers and checkpoints of plain training; each has its part of the states.

The ranks compare what they come to by themselves.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks


def test_every_way_gives_what_plain_data_parallel_training_gives(tmp_path: Path) -> None:
    run_ranks("tests.distributed.data_parallel_runs:against_plain", tmp_path)


# One test for what the ranks did: pytest-xdist would run them again for others.
def test_sharded_training_gives_what_it_gives_without_offload(tmp_path: Path) -> None:
    run_ranks("tests.distributed.sharded_runs:two_ranks", tmp_path)
    # A checkpoint of two ranks goes on with one and with four.
    for size in (1, 4):
        place = tmp_path / str(size)
        place.mkdir()
        where = "tests.distributed.sharded_runs:second_half"
        run_ranks(where, place, size, source=str(tmp_path))


@pytest.mark.parametrize("framework", ["accelerate", "the_trainer", "lightning", "fabric"])
def test_frameworks_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    if framework == "the_trainer":
        pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tier = tmp_path / "tier"
    tier.mkdir()
    run_ranks(f"tests.distributed.framework_runs:with_{framework}", tmp_path)
    assert list(tier.iterdir()) == []


def test_checkpoints_of_two_ranks_go_on_as_plain_ones_with_one_rank_and_with_four(
    tmp_path: Path,
) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    where = "tests.distributed.data_parallel_runs"
    run_ranks(f"{where}:save_half", tmp_path)
    for size in (1, 4):
        run_ranks(f"{where}:second_half", tmp_path, size)
    assert list(tier.iterdir()) == []
