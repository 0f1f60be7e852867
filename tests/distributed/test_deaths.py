"""A rank that dies takes the job down: in time, with a message that names it, and with no file.

torchrun may start the job again: the result is that of an unbroken run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

_SCRIPT = Path(__file__).parent / "doomed.py"
_RANKS = 4
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def test_torchrun_ends_all_ranks_and_names_the_one_that_was_killed(
    tmp_path: Path, disk: Path
) -> None:
    done = _run(
        *_TORCHRUN, f"--nproc-per-node={_RANKS}", str(_SCRIPT), str(disk), str(tmp_path), "step"
    )
    assert time.time() - float((tmp_path / "died").read_text()) < 30
    assert done.returncode != 0
    _all_trained_and_are_gone(tmp_path)
    assert "rank      : 2 (local_rank: 2)" in done.stderr
    assert "(SIGKILL)" in done.stderr
    assert "trained to the end" not in done.stdout


def test_ranks_without_a_launcher_end_by_themselves_and_name_the_one_that_is_gone(
    tmp_path: Path, disk: Path
) -> None:
    ways = ("backward", "step", "error")
    done = _run(str(_SCRIPT), str(disk), str(tmp_path), *ways)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for how in ways:
        notes = tmp_path / how
        _all_trained_and_are_gone(notes)
        victim = (notes / "process-2").read_text()
        for rank in range(_RANKS):
            status, seconds_after = found[how][str(rank)]
            said = (notes / f"output-{rank}").read_text()
            assert "trained to the end" not in said
            assert seconds_after < 30
            if rank != 2:
                assert f"rank 2 (process {victim})" in said, said
            elif how == "error":
                assert "OSError: an update failed" in said
            assert status == (-9 if rank == 2 and how != "error" else 1), said


def test_a_restarted_job_ends_with_the_parameters_of_an_unbroken_one(
    tmp_path: Path, disk: Path
) -> None:
    script = str(Path(__file__).parent / "elastic.py")
    # From the launcher's own store ranks that are started again may read where the old ones
    # listened (torch 2.13, with or without offload).
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = [*_TORCHRUN, "--nproc-per-node=2", "--max-restarts=1"]
    done = _run(*launcher, script, str(disk), str(tmp_path), **store)
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["restarts"], found["first"]) == (1, 3)
        assert found["moved"] > 0
        assert all(found[name] for name in ("losses", "weights", "states"))


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _all_trained_and_are_gone(notes: Path) -> None:
    for rank in range(_RANKS):
        assert not psutil.pid_exists(int((notes / f"process-{rank}").read_text()))
        assert float((notes / f"moved-{rank}").read_text()) > 0
