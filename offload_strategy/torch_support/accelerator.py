"""What devices can do: the one place that asks PyTorch about kinds of devices.

CUDA, ROCm (which PyTorch calls ``cuda``), XPU and devices that register themselves
(``PrivateUse1``) compute asynchronously on streams. On other devices (MPS, HPU) copies wait for
the device, which is slower and just as correct.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import get_device_module

_SYNCHRONOUS = frozenset({"cpu", "meta", "mps", "hpu"})

_Held = TypeVar("_Held")


class Autocast(NamedTuple):
    """To what autocast converts on devices of one type; None while it is disabled."""

    device_type: str
    dtype: torch.dtype | None = None

    @classmethod
    def current(cls, device_type: str) -> Autocast:
        """Return that of this thread."""
        available = torch.amp.is_autocast_available(device_type)
        if not available or not torch.is_autocast_enabled(device_type):
            return cls(device_type)
        return cls(device_type, torch.get_autocast_dtype(device_type))

    def entered(self) -> AbstractContextManager[object]:
        """Run a block under it, whatever the current one is."""
        if self == self.current(self.device_type):
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not None)


@cache
def is_asynchronous(device: torch.device) -> bool:
    """Return whether kernels and copies of a device run on streams, behind the host."""
    accelerator = torch.accelerator.current_accelerator()
    known = accelerator is not None and accelerator.type == device.type
    return known and device.type not in _SYNCHRONOUS


def current_stream(device: torch.device) -> torch.Stream:
    """Return this thread's current stream on a device, in less time than `torch.accelerator`."""
    if device.index is None:
        return torch.accelerator.current_stream(device)
    return torch._C._accelerator_getStream(device.index)


@contextmanager
def using_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one of this thread.

    A `torch.Stream` used as a context keeps the state to return to on itself, so one stream must
    not be entered by two threads at a time; this may be.
    """
    device = torch.accelerator.current_device_index()
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def elapsed_seconds(begin: torch.Event, end: torch.Event) -> float:
    """Return the seconds between two events that a device has reached, by its own clock."""
    return max(0.0, begin.elapsed_time(end) / 1000)


class ReleaseWindow(Generic[_Held]):
    """What other streams use, in order, of the memory of an owner, which overwrites what is freed.

    So it is referenced until the owner, a stream, has been told to wait for the end of that use.
    """

    def __init__(self, owner: torch.Stream) -> None:
        self._owner = owner
        self._uses: deque[tuple[torch.Event, int, _Held]] = deque()
        #: Bytes of what is referenced.
        self.nbytes = 0

    def __iter__(self) -> Iterator[_Held]:
        return (held for _, _, held in self._uses)

    def add(self, end: torch.Event, nbytes: int, held: _Held) -> None:
        """Reference so many bytes that are used until an event."""
        self._uses.append((end, nbytes, held))
        self.nbytes += nbytes

    def release(self, at_most: int = 0) -> list[_Held]:
        """Let the owner wait for the oldest uses until so many bytes are left; return those."""
        released, end = [], None
        while self._uses and self.nbytes > at_most:
            end, nbytes, held = self._uses.popleft()
            self.nbytes -= nbytes
            released.append(held)
        if end is not None:
            self._owner.wait_event(end)
        return released

    def release_unused(self) -> list[_Held]:
        """Return what is not used any more, without a wait."""
        released = []
        while self._uses and self._uses[0][0].query():
            _, nbytes, held = self._uses.popleft()
            self.nbytes -= nbytes
            released.append(held)
        return released


def is_capturing_graph() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------------- memory of a device
def has_memory_statistics(device: torch.device) -> bool:
    """Return whether the device's allocator counts bytes; one that was plugged in does not."""
    plugged = device.type == "cuda" and torch.cuda.get_allocator_backend() == "pluggable"
    return is_asynchronous(device) and not plugged


def _tensor_bytes(device: torch.device, which: str) -> int:
    # `memory_allocated` makes a list of all that is counted, which takes seven times as long.
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return int(torch._C._accelerator_getDeviceStats(index)["allocated_bytes"]["all"][which])


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a device."""
    return _tensor_bytes(device, "current")


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the largest number of bytes of tensors since `reset_peak`."""
    return _tensor_bytes(device, "peak")


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak."""
    get_device_module(device).reset_peak_memory_stats(device)


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this process has, or may still allocate within its memory fraction."""
    module = get_device_module(device)
    free, allowed = module.mem_get_info(device)
    if device.type in ("cuda", "xpu"):
        allowed *= module.get_per_process_memory_fraction(device)
    return int(min(free + module.memory_reserved(device), allowed))


# ---------------------------------------------------------------------- pinned host memory
def register_host_memory(address: int, nbytes: int) -> bool:
    """Pin host memory for asynchronous copies; return False where that is not supported."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    if accelerator.type == "cuda":
        if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            return True
        # CUDA keeps the error for whoever asks next: that shall not be a kernel of training.
        with suppress(RuntimeError):
            torch.empty(1, device=accelerator).fill_(0)
        return False
    register = getattr(get_device_module(accelerator), "host_register", None)
    return register is not None and int(register(address, nbytes)) == 0


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    if accelerator.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)
    else:
        get_device_module(accelerator).host_unregister(address)


# ---------------------------------------------------------------------- random numbers
def generators_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices of tensors whose generators are not the CPU's."""
    return list({tensor.device for tensor in tensors if is_asynchronous(tensor.device)})


def forked_generators(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Return a context that restores the generators of the CPU and of these devices."""
    kind = devices[0].type if devices else "cuda"
    return torch.random.fork_rng(devices=devices, device_type=kind)


def generator_states(devices: Iterable[torch.device]) -> list[torch.Tensor]:
    """Return the states of the generators of the CPU and of these devices."""
    return [torch.get_rng_state(), *(get_device_module(d).get_rng_state(d) for d in devices)]
