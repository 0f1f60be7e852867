"""How much memory there is for this process, how much it uses, and the peak of that."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.c_allocator import freed_memory
from offload_strategy.torch_support import accelerator

#: Lines of ``memory.stat`` of cgroups of version 1 and 2 that tell what cannot be reclaimed.
_OCCUPIED_V1, _OCCUPIED_V2 = ("total_rss ", "total_shmem "), ("anon ", "shmem ")

#: Share of what there is that training uses if no limit is given: a device's allocator leaves gaps.
_HOST_SHARE, _DEVICE_SHARE = 0.95, 0.85

#: What was read last, by process and figure: a forked child is another process.
_latest: dict[tuple[int, str], int] = {}


@cache
def _process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def _figure(name: str, read: Callable[[], int]) -> int:
    """Read a figure of the system; if that fails, as without a free descriptor, what it was last.

    Raises:
        OffloadError: it could not be read the first time.
    """
    key = os.getpid(), name
    try:
        _latest[key] = int(read())
    except (OSError, psutil.Error) as error:
        if key not in _latest:
            raise OffloadError(
                f"the {name} of the system cannot be read: {error}. If too many files are open, "
                f"close some or raise their limit (ulimit -n)."
            ) from error
    return _latest[key]


def resident_bytes() -> int:
    """Return the resident memory of this process; if it cannot be read now, what it was last."""
    return _figure("resident host memory", lambda: _process(os.getpid()).memory_info().rss)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that could be had now: of the machine's memory, and of what the cgroups allow."""
    own = resident_bytes()
    available = [_figure("free host memory", lambda: psutil.virtual_memory().available)]
    available += [limit - max(own, occupied) for limit, occupied in _memory_cgroups(root)]
    return max(0, min(available))


def memory_cgroup_limit(root: Path = Path("/")) -> int | None:
    """Bytes that the memory cgroups of this process allow, or None if they are unlimited."""
    return min((limit for limit, _ in _memory_cgroups(root)), default=None)


def _memory_cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each memory cgroup of this process that has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            base, file, occupied = root / "sys/fs/cgroup", "memory.max", _OCCUPIED_V2
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            occupied = _OCCUPIED_V1
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path is the host's, and what is mounted is the container's own group.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            with suppress(OSError):
                text = (place / file).read_text().strip()
                if text.isdecimal() and int(text) < 1 << 60:  # version 1 says "no limit" as 2^63
                    yield int(text), _occupied_bytes(place, occupied)


def _occupied_bytes(cgroup: Path, occupied: tuple[str, ...]) -> int:
    """Bytes of all its processes, those of its children among them; 0 if nothing tells."""
    with suppress(OSError, ValueError, IndexError):
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(occupied))
    return 0


def free_bytes(device: torch.device, processes: int) -> int:
    """Bytes of a device that this process, one of so many on the machine, may still use."""
    if accelerator.has_memory_statistics(device):
        return accelerator.available_bytes(device) - accelerator.allocated_bytes(device)
    return available_bytes() // processes


class PeakMeter:
    """Tells what a device, or the process where that is the CPU, had in memory at most.

    The kernel and torch keep one such figure each, which is reset: what others read from
    `torch.accelerator.max_memory_allocated` or ``VmHWM`` is then that of the last step, too. Where
    the kernel has none that may be reset (other systems than Linux, some containers), the current
    use stands for it. A model may move after it was attached: its device is asked of a parameter.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._latest_device = parameter.device
        self._proc = Path("/proc/self")
        #: Whether `peak_bytes` is a peak, as far as `reset_peak` has found.
        self.resets = True

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        parameter = self._parameter()
        if parameter is not None:
            self._latest_device = parameter.device
        return self._latest_device

    @property
    def counts_host_buffers(self) -> bool:
        """Whether buffers in host memory are of this memory."""
        return self.device.type == "cpu"

    def reset_peak(self) -> None:
        """Begin a new peak."""
        if accelerator.has_memory_statistics(self.device):
            accelerator.reset_peak(self.device)
            return
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:  # not allowed: the figure would be that of the process's whole life
            self.resets = False

    def peak_bytes(self) -> int:
        """Bytes at most since `reset_peak`."""
        if accelerator.has_memory_statistics(self.device):
            return accelerator.peak_allocated_bytes(self.device)
        with suppress(OSError):
            for line in (self._proc / "status").read_text().splitlines() if self.resets else ():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self.used_bytes()

    def used_bytes(self) -> int:
        """Bytes at this moment, without those of freed tensors as far as they are known."""
        if accelerator.has_memory_statistics(self.device):
            return accelerator.allocated_bytes(self.device)
        return resident_bytes() - (freed_memory.nbytes() if self.counts_freed else 0)

    @property
    def counts_freed(self) -> bool:
        """Whether memory of freed tensors, which the C library keeps, is in these figures."""
        return self.counts_host_buffers and freed_memory.is_known

    def needed_bytes(self) -> int:
        """Bytes of tensors at this moment, or of all that is used where nobody counts those."""
        return freed_memory.in_use_bytes() if self.counts_freed else self.used_bytes()

    def return_freed(self, beyond: int) -> None:
        """Return memory of freed tensors to the system, if there are more bytes of it."""
        if self.counts_freed and freed_memory.nbytes() > beyond:
            freed_memory.return_all()

    def default_limit_bytes(self, processes: int) -> int:
        """Bytes that this process, one of so many on the machine, may use if no limit is given."""
        if accelerator.has_memory_statistics(self.device):
            return int(_DEVICE_SHARE * accelerator.available_bytes(self.device))
        return int(_HOST_SHARE * (available_bytes() // processes + resident_bytes()))
