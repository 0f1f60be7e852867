"""Accelerate's own test scripts, launched as its tests launch them, in one process and in two.

Those for GPUs and for FSDP version 1 are left out.
"""

import subprocess
import sys

import pytest

_SCRIPTS = ["test_script", "test_sync", "test_ops", "test_distributed_data_loop"]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", _SCRIPTS)
def test_script(script, processes, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    launch += ["--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    name = f"accelerate.test_utils.scripts.{script}"
    output = tmp_path / "output"  # not a pipe: a worker that is left would keep it open
    with output.open("w") as file:
        done = subprocess.run(
            [*launch, "-m", name], stdout=file, stderr=subprocess.STDOUT, check=False, timeout=280
        )
    assert done.returncode == 0, output.read_text()[-4000:]
