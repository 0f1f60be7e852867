"""A rank that dies takes the job down: in time, with a message that names it, and with no file.

torchrun may start the job again: the result is that of an unbroken run.
"""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.distributed.doomed import RANKS
from tests.distributed.ranks import run_ranks


def test_torchrun_ends_all_ranks_and_names_the_one_that_was_killed(
    tmp_path: Path, disk: Path
) -> None:
    where = "tests.distributed.doomed:by_the_launcher"
    ((error, seconds_after),) = run_ranks(where, tmp_path, size=1, group=False, tier=str(disk))
    # The launcher tells of the rank that it finds first: the killed one, or another that names it.
    named = f"rank 2 (process {(tmp_path / 'process-2').read_text()})"
    assert ("rank      : 2 (local_rank: 2)" in error and "(SIGKILL)" in error) or named in error
    assert seconds_after < 30
    _all_trained_and_are_gone(tmp_path)


def test_ranks_without_a_launcher_end_by_themselves_and_name_the_one_that_is_gone(
    tmp_path: Path, disk: Path
) -> None:
    ways = ["backward", "step", "error"]
    where = "tests.distributed.doomed:by_themselves"
    (found,) = run_ranks(where, tmp_path, size=1, group=False, tier=str(disk), ways=ways)
    for how in ways:
        notes = tmp_path / how
        _all_trained_and_are_gone(notes)
        victim = (notes / "process-2").read_text()
        for rank in range(RANKS):
            status, seconds_after = found[how][str(rank)]
            said = (notes / f"output-{rank}").read_text()
            assert seconds_after < 30
            if rank != 2:
                assert f"rank 2 (process {victim})" in said, said
            elif how == "error":
                assert "OSError: an update failed" in said
            assert status == (-9 if rank == 2 and how != "error" else 1), said


def test_a_restarted_job_ends_with_the_parameters_of_an_unbroken_one(
    tmp_path: Path, disk: Path
) -> None:
    where = "tests.distributed.doomed:restarted"
    run_ranks(where, tmp_path, size=1, group=False, tier=str(disk))
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["restarts"], found["first"], found["differs"]) == (1, 3, [])
        assert found["moved"] > 0


def _all_trained_and_are_gone(notes: Path) -> None:
    assert not (notes / "to-the-end").exists()
    for rank in range(RANKS):
        assert not psutil.pid_exists(int((notes / f"process-{rank}").read_text()))
        assert float((notes / f"moved-{rank}").read_text()) > 0
