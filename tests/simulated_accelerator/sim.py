"""A simulated accelerator, the device ``sim``: streams are threads, and kernels run late.

It is a PyTorch device (``PrivateUse1``) in host memory. Every operator is the CPU's kernel,
launched on the worker thread of a stream over raw pointers that keep nothing alive, with CUDA's
rules: a missing `wait_stream`, event or `record_stream`, or a pinned buffer that is used again too
early, gives wrong bytes on any machine, without a GPU.

Importing this module compiles the extension (at the first use), registers the device for the
whole process, and makes `torch.accelerator` answer for it. Random operators draw from the CPU's
generator, so that a run compares bit for bit with one on the CPU.

Limits: no graphs, no `torch.compile`, no access of files to device memory; scaled dot product
attention takes the math path. A run samples schedules: one without a difference proves nothing.

The module itself is `torch.sim`: what PyTorch asks of the Python module of a device, and the
controls of the simulation.
"""

import atexit
import fcntl
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

_SOURCES = Path(__file__).parent / "csrc"
_BUILD = Path(__file__).parents[2] / "build" / "simulated_accelerator"


def _compiled() -> Any:
    """Compile what changed and import it, one process at a time."""
    if shutil.which("ninja") is None:  # A virtual environment that is not activated has its own.
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    _BUILD.mkdir(parents=True, exist_ok=True)
    # PyTorch's lock is a file that outlives a process that is killed, and the next would wait for
    # it for ever. The system's lock ends with its process; whoever holds it removes the other one.
    with (_BUILD / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (_BUILD / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "offload_strategy_sim",
            [str(_SOURCES / "runtime.cpp"), str(_SOURCES / "operators.cpp")],
            extra_cflags=["-O1", "-std=c++20"],
            build_directory=str(_BUILD),
        )


extension = _compiled()

Stream, Event = torch.Stream, torch.Event

memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
memory_stats = torch.accelerator.memory_stats
mem_get_info = torch.accelerator.get_memory_info
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache
current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
device_count = extension.device_count
init = _lazy_init = extension.init


class device(torch.accelerator.device_index):
    def __init__(self, device: torch.device | int | str | None) -> None:
        super().__init__(torch.accelerator._get_device_index(device, optional=True))


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return False


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def synchronize(device: torch.device | int | str | None = None) -> None:
    torch.accelerator.synchronize(device)
    extension.check_error()


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


host_register = extension.host_register
host_unregister = extension.host_unregister

# Controls of the simulation.
launch_python = extension.launch_python
pinned_bytes = extension.pinned_bytes
set_delays = extension.set_delays
set_memory_limit = extension.set_memory_limit
set_pinned_limit = extension.set_pinned_limit
set_seed = extension.set_seed
sleep = extension.sleep
synchronize_all = extension.synchronize_all


def counts(reset: bool = False, this_thread: bool = False) -> dict[str, int]:
    """Return how often each thing happened, by ``async:``, ``staged:``, ``sync:`` and ``pinned:``.

    With `reset` all counts start at zero again, with `this_thread` others do not count.
    """
    return _totals(reset, lambda thread: not this_thread or thread == threading.get_native_id())


def training_counts(reset: bool = False) -> dict[str, int]:
    """Return how often each thing happened, but not in the package's own threads."""
    ours = {t.native_id for t in threading.enumerate() if t.name.startswith("ssd-offload")}
    return _totals(reset, lambda thread: thread not in ours)


def _totals(reset: bool, counted: Callable[[int], bool]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for (thread, name), number in extension.counts(reset).items():
        if counted(thread):
            totals[name] += number
    return dict(totals)


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
init()
set_seed(int(os.environ.get("SIM_SEED", "0")))
atexit.register(synchronize_all)
