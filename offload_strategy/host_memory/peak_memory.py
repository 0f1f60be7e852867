"""The peak of memory since it was last asked for."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from offload_strategy.host_memory.memory_limits import available_bytes
from offload_strategy.torch_support import accelerator


class PeakMeter:
    """Tells what a device, or the process where that is the CPU, had in memory at most.

    The kernel and torch keep one such figure each, which is started anew: what others read from
    `torch.accelerator.max_memory_allocated` or ``VmHWM`` is then that of the last step, too. Where
    the kernel keeps none that may be started anew (other systems than Linux, some containers),
    memory is looked at when it is asked for.

    Args:
        device: that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._proc = Path("/proc/self")
        self._starts_over = True

    @property
    def counts_host_buffers(self) -> bool:
        """Whether buffers in host memory are of this memory."""
        return self._device.type == "cpu"

    def reset_peak(self) -> None:
        """Forget what was."""
        if accelerator.has_memory_statistics(self._device):
            accelerator.reset_peak(self._device)
            return
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:  # not allowed: the figure would be that of the process's whole life
            self._starts_over = False

    def peak_bytes(self) -> int:
        """At most, since then."""
        if accelerator.has_memory_statistics(self._device):
            return accelerator.peak_allocated_bytes(self._device)
        if not self._starts_over:
            return self.used_bytes()
        try:
            for line in (self._proc / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return self.used_bytes()

    def used_bytes(self) -> int:
        """At this moment."""
        if accelerator.has_memory_statistics(self._device):
            return accelerator.allocated_bytes(self._device)
        return int(psutil.Process().memory_info().rss)

    def total_bytes(self) -> int:
        """What there is in all, for this process."""
        if accelerator.has_memory_statistics(self._device):
            return accelerator.available_bytes(self._device)
        return available_bytes() + self.used_bytes()
