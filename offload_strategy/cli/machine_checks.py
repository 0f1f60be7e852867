"""Checks of the machine in `ssd-offload doctor`: torch, memory, limits, GPU, backends, encryption.

Figures of the system are arguments where they matter, so that every result can be tested on any
machine.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from offload_strategy.config import OffloadConfig
from offload_strategy.errors import ConfigError, OffloadError
from offload_strategy.io.queues.encryption import BlockCipher
from offload_strategy.units import PAGE_BYTES, format_size

#: Data loaders that share tensors by file descriptors need about so many.
_FEW_FILES = 1024

Status = Literal["ok", "warning", "problem"]
#: All is well; something costs speed or may surprise; training does not work.
OK, WARNING, PROBLEM = get_args(Status)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report, with advice unless nothing is to be done."""

    name: str
    status: Status
    found: str
    advice: str = ""


def refused(name: str, error: OffloadError) -> Check:
    """Return a problem from an error: its first sentence says what, the others what to do."""
    found, *advice = re.split(r"\. (?=[A-Z])", str(error), maxsplit=1)
    return Check(name, PROBLEM, found, advice[0] if advice else "name another path")


def check_gpu(devices: Path = Path("/dev")) -> Check:
    """Check the accelerator that torch sees."""
    if torch.cuda.is_available():
        names = Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
        return Check("GPU", OK, ", ".join(f"{count} x {name}" for name, count in names.items()))
    if torch.accelerator.is_available():
        found = f"{torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}"
        return Check("GPU", OK, found)
    if (devices / "nvidiactl").exists():
        found = f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU"
        advice = "install a torch for the driver's CUDA version, and look at CUDA_VISIBLE_DEVICES"
        return Check("GPU", WARNING, found, advice)
    return Check("GPU", OK, "none: training on the CPU")


def check_cufile(has_cuda: bool, proc: Path = Path("/proc")) -> Check:
    """Check GPUDirect Storage: the cuFile library and the nvidia-fs kernel module."""
    if not has_cuda:
        return Check("cuFile", OK, "not used: torch sees no NVIDIA GPU")
    if importlib.util.find_spec("kvikio") is None:
        found = "kvikio is not installed: bytes pass through host memory"
        advice = "for GPUDirect Storage: pip install 'offload-strategy[kvikio]'"
        return Check("cuFile", WARNING, found, advice)
    try:
        version = (proc / "driver/nvidia-fs/version").read_text().strip()
    except OSError:
        found = "the kernel module nvidia-fs is not loaded: cuFile works in its compatibility mode"
        advice = "for GPUDirect Storage, install nvidia-gds and load nvidia-fs"
        return Check("cuFile", WARNING, found, advice)
    return Check("cuFile", OK, f"nvidia-fs {version.partition(':')[2].strip() or version}")


def check_backends(wanted: str, available: Mapping[str, str | None]) -> Iterator[Check]:
    """Check the I/O backends, of which those with a reason cannot run."""
    for name, reason in available.items():
        label = f"backend {name}"
        if reason is None:
            yield Check(label, OK, "can run")
        elif name == wanted:
            advice = "set io.backend: auto, or install what is missing"
            yield Check(label, PROBLEM, f"cannot run: {reason}", advice)
        else:
            yield Check(label, OK, f"cannot run, and is not needed: {reason}")


def check_encryption(wanted: bool) -> Check:
    """Check the package cryptography, which is needed if `io.encryption` is wanted."""
    try:
        BlockCipher(PAGE_BYTES)
    except ConfigError as error:
        if wanted:
            return refused("encryption", error)
        return Check("encryption", OK, f"cannot be used, and is not needed: {error}")
    return Check("encryption", OK, "the package cryptography can be used")


def check_memory(
    config: OffloadConfig, *, processes: int, total: int, available: int, limit: int | None
) -> Check:
    """Check whether host memory has room for the buffers and dram tiers of all local processes.

    `limit` is that of the memory cgroup, if it has one; all figures are in bytes.
    """
    tiers = sum(tier.capacity or 0 for tier in config.tiers if tier.kind == "dram")
    has_gpu = torch.accelerator.is_available()
    pinned = config.memory.pinned_bytes(available // processes, accelerated=has_gpu)
    need = pinned * processes + tiers  # all processes share the capacity of a tier
    most = min(total, limit or total)
    has = f"{format_size(total)} of main memory, {format_size(available)} available"
    if limit is not None and limit < total:
        has += f", memory cgroup limit {format_size(limit)}"
    several = f" ({processes} processes)" if processes > 1 else ""
    found = f"{has}; the config takes up to {format_size(need)}{several}"
    lower = "lower memory.pinned or the capacity of dram tiers"
    if need >= most:
        return Check("memory", PROBLEM, found, f"{lower}, or the process will be killed")
    if need > min(available, most):
        return Check("memory", WARNING, found, f"{lower}, or end other programs")
    return Check("memory", OK, found)


def check_huge_pages(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> Check:
    """Check transparent huge pages, which buffers request with madvise."""
    try:
        text = file.read_text()
    except OSError:
        return Check("huge pages", OK, "this kernel has no transparent huge pages")
    chosen = re.search(r"\[(\w+)\]", text)
    setting = chosen[1] if chosen else text.strip()
    if setting == "never":
        found = "transparent huge pages are off (never): moving bytes costs more CPU time"
        return Check("huge pages", WARNING, found, f"as root: echo madvise > {file}")
    return Check("huge pages", OK, f"transparent huge pages: {setting}")


def check_locked_memory(limit: int | None, pinned: int, has_gpu: bool) -> Check:
    """Check the limit of locked memory, which buffers count against that are pinned for a GPU."""
    shown = "unlimited" if limit is None else format_size(limit)
    if not has_gpu:
        return Check("locked memory", OK, f"{shown} (not needed without a GPU)")
    if limit is None or limit >= pinned:
        return Check("locked memory", OK, shown)
    found = f"the limit is {shown}, memory.pinned is {format_size(pinned)}"
    advice = "if pinning is refused: ulimit -l unlimited, or memlock in /etc/security/limits.conf"
    return Check("locked memory", WARNING, found, advice)


def check_open_files(limit: int | None) -> Check:
    """Check how many files a process may have open; None for no limit."""
    if limit is not None and limit < _FEW_FILES:
        advice = f"ulimit -n {_FEW_FILES}: data loaders need many"
        return Check("open files", WARNING, f"at most {limit}", advice)
    return Check("open files", OK, "unlimited" if limit is None else f"at most {limit}")


def resource_limit(name: str) -> int | None:
    """Return the soft limit `RLIMIT_...` of this process, or None."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft
