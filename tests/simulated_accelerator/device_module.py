"""`torch.sim`: what PyTorch asks of the Python module of a device."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.simulated_accelerator.extension import extension

Stream, Event = torch.Stream, torch.Event
Device = torch.device | int | str | None

memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache


class device:
    """Make a device the current one for a block of code."""

    def __init__(self, device: Device) -> None:
        self._index = torch.accelerator._get_device_index(device, optional=True)
        self._before = -1

    def __enter__(self) -> None:
        self._before = extension.exchange_device(self._index)

    def __exit__(self, *_: object) -> None:
        extension.exchange_device(self._before)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    extension.init()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(extension.device_count())


def current_device() -> int:
    return int(extension.current_device())


def set_device(device: Device) -> None:
    extension.exchange_device(torch.accelerator._get_device_index(device, optional=True))


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(device)
    extension.check_error()


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(device)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    """The state of the CPU's generator, which random operators of this device use."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Nothing: `torch.manual_seed` seeds the CPU's generator, which this device uses."""


manual_seed_all = manual_seed


def initial_seed() -> int:
    return torch.initial_seed()


host_register = extension.host_register
host_unregister = extension.host_unregister

# Controls of the simulation.
set_delays = extension.set_delays
set_memory_limit = extension.set_memory_limit
set_seed = extension.set_seed
sleep = extension.sleep


def counts(reset: bool = False, this_thread: bool = False) -> dict[str, int]:
    """Return how often each thing happened, by ``async:``, ``staged:``, ``sync:`` and ``pinned:``.

    Args:
        reset: Start all counts at zero again.
        this_thread: Count only what the calling thread did.
    """
    totals: dict[str, int] = {}
    for (thread, name), number in extension.counts(reset).items():
        if not this_thread or thread == threading.get_native_id():
            totals[name] = totals.get(name, 0) + number
    return totals


def training_counts(reset: bool = False) -> dict[str, int]:
    """Return how often each thing happened, but not in the package's own threads."""
    ours = {t.native_id for t in threading.enumerate() if t.name.startswith("ssd-offload")}
    totals: dict[str, int] = {}
    for (thread, name), number in extension.counts(reset).items():
        if thread not in ours:
            totals[name] = totals.get(name, 0) + number
    return totals


def synchronizing_calls(reset: bool = False, this_thread: bool = True) -> dict[str, int]:
    """Return which calls made a thread wait for the device, and how often."""
    return {
        name.removeprefix("sync:"): number
        for name, number in counts(reset, this_thread).items()
        if name.startswith("sync:")
    }
