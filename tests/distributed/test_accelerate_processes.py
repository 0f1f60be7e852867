"""Accelerate and Transformers with two processes: numbers and checkpoints of plain training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks


def test_a_loop_with_accelerate_gives_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path,
) -> None:
    for kinds in run_ranks("tests.distributed.accelerate_runs:all_runs", tmp_path):
        for runs in kinds:  # data-parallel and sharded
            assert len(runs) == 4
            assert [run["case"] for run in runs if run["differs"]] == []
            assert all(run["optimizer"] > 0 and run["activations"] > 0 for run in runs)


def test_the_trainer_and_lora_give_the_numbers_and_checkpoints_of_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tier = tmp_path / "tier"
    tier.mkdir()
    for runs in run_ranks("tests.distributed.trainer_runs:compared", tmp_path):
        # From the start, and resumed by both from the files of both; with LoRA by ours from ours.
        assert len(runs) == (1 + 4) + (1 + 1)
        assert [run["case"] for run in runs if run["differs"]] == []
        offloaded = [run for run in runs if run["case"][1]]
        assert len(offloaded) == 3 + 2
        assert all(moved > 0 for run in offloaded for moved in run["moved"])
    assert list(tier.iterdir()) == []
