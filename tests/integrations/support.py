"""What the tests of the integrations share: fresh processes, a tiny model, and its data."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

OURS = ("SSD_OFFLOAD_", "ACCELERATE_", "TORCH_DEVICE_BACKEND_AUTOLOAD", "WANDB_")

OFFLOAD_ALL = {"mode": "always", "activations": {"min_size": "1KiB", "budget": "100%"}}
"""Small enough for nearly everything that a tiny model saves to leave."""

STREAMED = {"parameters": {"enabled": True, "min_size": 1}, "activations": {"min_size": 1}}


def environment(home: Path, **variables: str) -> dict[str, str]:
    """The environment of a fresh process: none of ours, no configs of the user's."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
    return {
        **clean,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "SSD_OFFLOAD_DIR": str(home),
        **variables,
    }


def python(
    *arguments: str, home: Path, variables: Mapping[str, str] | None = None, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run Python in `home` and return what it wrote."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=home,
        env=environment(home, **(variables or {})),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads below a directory: step and value by name."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(directory.rglob("events.out.tfevents.*")):
        events = reader.EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found = [(event.step, event.value) for event in events.Scalars(name)]
            scalars.setdefault(name, []).extend(found)
    return scalars


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """What a process printed; fails with its errors if it failed."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
