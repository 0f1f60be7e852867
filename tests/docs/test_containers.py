"""What docs/how-to/clusters.md says of containers, in a namespace that has what a container has.

No capability, no new privileges, a container's layer (overlay), a temporary directory in memory,
little shared memory, and next to no memory that may be locked.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.module_map import ROOT

TRAINING = """
import torch
from offload_strategy import OffloadEngine
from offload_strategy.config import default_directory

print("the default is in", default_directory())
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
inner = torch.optim.AdamW(model.parameters())
with OffloadEngine({"mode": "always", "activations": {"min_size": 1}}) as engine:
    optimizer = engine.attach(model, inner)
    for _ in range(3):
        model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained:", engine.metrics()["offload/optimizer/written_bytes"] > 0)
"""

CONTAINER = """
set -e
mount -t tmpfs tmpfs /tmp
mount -t tmpfs -o size=64k tmpfs /dev/shm
mount -t overlay overlay -o lowerdir=low,upperdir=up,workdir=work layer
ulimit -l 64
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""


def inside():
    """The words that run a command in such a namespace; /tmp is hidden in it."""
    if any(Path(place).resolve().is_relative_to("/tmp") for place in (ROOT, sys.prefix)):
        pytest.skip("the sources or the environment are in /tmp, which is hidden")
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("needs unshare and setpriv (util-linux)")
    namespace = ["unshare", "--mount", "--map-root-user"]
    probe = [*namespace, "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this system allows no mounts in a namespace: {done.stderr.strip()}")
    return [*namespace, "bash", "-c", CONTAINER, "bash"]


@pytest.mark.slow
def test_training_works_in_a_container_whose_layer_doctor_names():
    container = inside()
    usual = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "SSD_OFFLOAD_DIR")}

    def run(*words, **variables):
        environment = {**usual, "PYTHONPATH": str(ROOT), "HOME": home, "COLUMNS": "300"}
        done = subprocess.run(
            [*container, sys.executable, *words], cwd=home, env=environment | variables,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    with TemporaryDirectory(dir="/var/tmp") as home:  # on a disk, outside of what is hidden
        for folder in ("low", "up", "work", "layer"):
            Path(home, folder).mkdir()
        up, layer = Path(home, "up"), Path(home, "layer")
        Path(home, "train.py").write_text(TRAINING)
        assert run("train.py").splitlines() == ["the default is in /var/tmp", "trained: True"]
        assert "trained: True" in run("train.py", SSD_OFFLOAD_DIR=str(layer))
        assert list(up.iterdir()) == []
        printed = run("-m", "offload_strategy.cli", "doctor", str(layer))
    assert f"warning  {layer}: file system: overlay, a container's own layer" in printed
    assert "Training works here" in printed
