"""torchrun restarts a job of which a rank was killed: the result is that of an unbroken run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parent / "elastic.py"


def test_a_restarted_job_ends_with_the_parameters_of_an_unbroken_one(
    tmp_path: Path, disk: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # From the launcher's own store ranks that are started again may read where the old ones
    # listened (torch 2.13, with or without offload).
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=1", str(_SCRIPT), str(disk), str(tmp_path)],
        env={**os.environ, **store, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert (found["restarts"], found["first"]) == (1, 3)
        assert found["moved"] > 0
        assert all(found[name] for name in ("losses", "weights", "states"))
