"""Reentrant checkpoints in data-parallel training: they run backward passes within the pass."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.ranks import run_ranks


def test_reentrant_checkpoints_give_what_they_give_without_offload(tmp_path: Path) -> None:
    for rank in run_ranks("tests.distributed.reentrant_runs:against_plain", tmp_path):
        assert len(rank) == 18
        assert [run for run in rank if run[3]] == []
        assert all(run[4] > 0 for run in rank)
