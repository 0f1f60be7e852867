"""What docs/how-to/clusters.md says of containers, in a namespace that has what a container has.

No capability, no new privileges, a container's layer (overlay), a temporary directory in memory,
little shared memory, and next to no memory that may be locked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reader import ROOT

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


@pytest.fixture
def inside() -> list[str]:
    """The words that run a command in such a namespace; /tmp is hidden in it."""
    namespace = ["unshare", "--mount", "--map-root-user"]
    if not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("needs unshare and setpriv (util-linux)")
    if any(Path(place).resolve().is_relative_to("/tmp") for place in (ROOT, sys.prefix)):
        pytest.skip("the sources or the environment are in /tmp, which is hidden")
    probe = subprocess.run(
        [*namespace, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True
    )
    if probe.returncode != 0:
        pytest.skip(f"this system allows no mounts in a namespace: {probe.stderr.strip()}")
    return [*namespace, "bash", "-c", CONTAINER, "bash"]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder on a disk, outside of what is hidden."""
    home = Path("/var/tmp") / f"offload-container-{os.getpid()}"
    for folder in ("low", "up", "work", "layer"):
        (home / folder).mkdir(parents=True)
    yield home
    shutil.rmtree(home)


@pytest.mark.slow
def test_training_works_in_a_container_whose_layer_doctor_names(
    inside: list[str], home: Path
) -> None:
    (home / "train.py").write_text(TRAINING)
    usual = {k: v for k, v in os.environ.items() if k not in ("TMPDIR", "SSD_OFFLOAD_DIR")}
    usual |= {"PYTHONPATH": str(ROOT), "HOME": str(home), "COLUMNS": "300"}

    def run(*words: str, **variables: str) -> str:
        command = [*inside, sys.executable, *words]
        done = subprocess.run(
            command, cwd=home, env=usual | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("train.py").splitlines() == ["the default is in /var/tmp", "trained: True"]
    assert "trained: True" in run("train.py", SSD_OFFLOAD_DIR=str(home / "layer"))
    assert list((home / "up").iterdir()) == []
    printed = run("-m", "offload_strategy.cli", "doctor", str(home / "layer"))
    assert f"warning  {home}/layer: file system: overlay, a container's own layer" in printed
    assert "Training works here" in printed
