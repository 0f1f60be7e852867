"""Accelerate and Transformers with two processes: numbers and checkpoints of plain training."""

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
        assert len(rank) == 5
        assert [run["case"] for run in rank if run["differs"]] == []
        assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in rank)


def test_the_trainer_and_lora_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tier = tmp_path / "tier"
    tier.mkdir()
    for runs in run_ranks("tests.distributed.trainer_runs:compared", tmp_path):
        # With and without LoRA: from the start, and resumed by both from the files of both.
        assert len(runs) == 2 * (1 + 4)
        assert [run["case"] for run in runs if run["differs"]] == []
        offloaded = [run for run in runs if run["case"][1]]
        assert len(offloaded) == 2 * 3
        assert all(moved > 0 for run in offloaded for moved in run["moved"])
    assert list(tier.iterdir()) == []
