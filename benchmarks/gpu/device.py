"""The device that is measured, real or simulated: its name, its memory, its bits."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before CUDA is initialised: else cuBLAS may choose another algorithm from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import psutil
import torch

from benchmarks.machine import commit, describe_machine, versions

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "sim"
NEEDS = (
    "needs an accelerator that torch can use (torch.accelerator.is_available() is False); "
    "--device sim runs everything on the simulated one"
)
_PACKAGES = ("transformers", "accelerate", "pytorch-lightning", "trl", "torchao", "deepspeed")


class Unavailable(Exception):
    """Something cannot be done on this device or machine; says why."""


def prepare(kind: str) -> None:
    """Make a type of device usable in this process; the simulated one is then its only one."""
    if kind == SIMULATED:
        from tests.simulated_accelerator import sim  # noqa: F401

        # Its kernels run on the host's cores. With more threads each they would take the cores, and
        # the caches, of the threads that train, which no real device does.
        torch.set_num_threads(1)


def describe(kind: str, directory: Path) -> dict[str, Any]:
    """The machine, the device and the versions, of a process that has the device."""
    free, total = torch.accelerator.get_memory_info(0)
    ask = getattr(torch.get_device_module(kind), "get_device_name", None)
    return {
        **describe_machine(directory),
        "simulated": kind == SIMULATED,
        "device": f"{kind} device" if ask is None else ask(0),
        "device_bytes": total,
        "device_free_bytes": free,
        "host_available_bytes": psutil.virtual_memory().available,
        "CUDA": torch.version.cuda,
        "commit": commit(ROOT),
        **versions(_PACKAGES),
    }


# ---------------------------------------------------------------------- memory, kernels, bits
def set_memory_limit(kind: str, nbytes: int | None) -> bool:
    """Let this process allocate so many bytes; None for all. False if the device cannot do that."""
    if kind == SIMULATED:
        torch.get_device_module(kind).set_memory_limit(0, -1 if nbytes is None else nbytes)
        return True
    limit = getattr(torch.get_device_module(kind), "set_per_process_memory_fraction", None)
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
def repeatable(*, strict: bool = False) -> Iterator[None]:
    """Two runs compute the same bits; some kernels are slower.

    Unless it is `strict`, operations that have no such kernel are allowed, and attention has the
    kernels that it always has.
    """
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # Else every new tensor is filled first, buffers on the host as well.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def digest(model: torch.nn.Module) -> str:
    """Of sums of the bits of gradients, taken where they are; a few numbers for each."""
    sums = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        bits = parameter.grad.detach().contiguous().flatten().view(torch.uint8)
        words = bits[: bits.numel() // 4 * 4].view(torch.int32)
        sums += [words.sum(dtype=torch.int64), words[::7].sum(dtype=torch.int64)]
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()
