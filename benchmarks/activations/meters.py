"""The memory peak of a step, on the host or on a device."""

from __future__ import annotations

from typing import Protocol

import torch

from benchmarks.machine import forget_peak, status_bytes


class MemoryMeter(Protocol):
    """Measures one step after the other."""

    def begin(self, idle_bytes: int) -> None:
        """A step begins: with gradients allocated, and so many bytes of idle buffers of ours."""

    def peak(self) -> int:
        """Bytes at the peak since `begin`, above the level there."""

    def whole(self) -> int:
        """Bytes at the peak since `begin`, in all."""

    def wait(self) -> None:
        """Until everything that was asked for is computed: before a look at the clock."""


class HostMeter:
    """The kernel's high-water mark of resident memory.

    Idle buffers of ours lie in memory between steps: they count as activation memory.
    """

    def begin(self, idle_bytes: int) -> None:
        """See `Meter`."""
        self._level = status_bytes("VmRSS") - idle_bytes
        forget_peak()

    def peak(self) -> int:
        """See `Meter`."""
        return status_bytes("VmHWM") - self._level

    def whole(self) -> int:
        """See `Meter`."""
        return status_bytes("VmHWM")

    def wait(self) -> None:
        """The host computes when it is told to."""


class DeviceMeter:
    """What the caching allocator of a device has handed out; our buffers are on the host."""

    def begin(self, idle_bytes: int) -> None:
        """See `Meter`."""
        self.wait()
        self._level = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()

    def peak(self) -> int:
        """See `Meter`."""
        return int(torch.accelerator.max_memory_allocated()) - self._level

    def whole(self) -> int:
        """See `Meter`."""
        return int(torch.accelerator.max_memory_allocated())

    def wait(self) -> None:
        """See `Meter`."""
        torch.accelerator.synchronize()


def meter(device: str) -> MemoryMeter:
    """The one for a device."""
    return HostMeter() if device == "cpu" else DeviceMeter()
