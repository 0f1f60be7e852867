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
"""

from __future__ import annotations

import atexit
import os

import torch

from tests.simulated_accelerator import device_module
from tests.simulated_accelerator.extension import extension as _C

torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", device_module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_C.init()
_C.set_seed(int(os.environ.get("SIM_SEED", "0")))
atexit.register(_C.synchronize_all)

check_error = _C.check_error
counts = device_module.counts
empty_host_cache = _C.empty_host_cache
host_register = device_module.host_register
host_unregister = device_module.host_unregister
launch_python = _C.launch_python
pinned_bytes = _C.pinned_bytes
set_blocking = _C.set_blocking
set_delays = device_module.set_delays
set_memory_limit = device_module.set_memory_limit
set_pinned_limit = _C.set_pinned_limit
set_poison = _C.set_poison
set_registration_time = _C.set_registration_time
set_seed = device_module.set_seed
sleep = device_module.sleep
synchronizing_calls = device_module.synchronizing_calls
synchronize_all = _C.synchronize_all
