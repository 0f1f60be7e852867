"""The device that is measured, real or simulated: its name, its memory, its kernels."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

# Before CUDA is initialised: else cuBLAS may choose another algorithm from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import psutil
import torch

from benchmarks.machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "sim"
_PACKAGES = ("transformers", "accelerate", "pytorch-lightning", "trl", "torchao", "deepspeed")


def prepare(kind: str) -> None:
    """Make a type of device usable in this process; the simulated one is then its only one."""
    if kind == SIMULATED:
        from tests.simulated_accelerator import sim  # noqa: F401


def module(kind: str) -> Any:
    return torch.get_device_module(kind)


def describe(kind: str, directory: Path) -> dict[str, Any]:
    """The machine, the device and the versions, of a process that has the device."""
    free, total = torch.accelerator.get_memory_info(0)
    name = getattr(module(kind), "get_device_name", lambda index: f"{kind} device")(0)
    found = {
        **describe_machine(directory),
        "simulated": kind == SIMULATED,
        "device": "simulated accelerator" if kind == SIMULATED else name,
        "device_bytes": total,
        "device_free_bytes": free,
        "host_available_bytes": psutil.virtual_memory().available,
        "CUDA": torch.version.cuda,
        "commit": _commit(),
    }
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    try:
        asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


# ---------------------------------------------------------------------- memory, kernels, counts
def set_memory_limit(kind: str, nbytes: int | None) -> bool:
    """Let this process allocate so many bytes; None for all. False if the device cannot do that."""
    if kind == SIMULATED:
        module(kind).set_memory_limit(0, -1 if nbytes is None else nbytes)
        return True
    limit = getattr(module(kind), "set_per_process_memory_fraction", None)
    if limit is not None:
        total = torch.accelerator.get_memory_info(0)[1]
        limit(1.0 if nbytes is None else min(1.0, nbytes / total))
    return limit is not None


def release_memory() -> int:
    """Give cached memory back; returns the bytes that are still in use."""
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.memory_allocated())


@contextmanager
def repeatable() -> Iterator[None]:
    """Two runs compute the same bits; some kernels are slower."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every new tensor is filled first, buffers on the host as well.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def training_counts(*, reset: bool = False) -> dict[str, int]:
    """What all threads but those of the package did on the simulated device, by its names."""
    from tests.simulated_accelerator.extension import extension

    ours = {t.native_id for t in threading.enumerate() if t.name.startswith("ssd-offload")}
    found: dict[str, int] = {}
    for (thread, name), number in extension.counts(reset).items():
        if thread not in ours:
            found[name] = found.get(name, 0) + number
    return found
