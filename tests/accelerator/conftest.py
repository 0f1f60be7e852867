"""Every test needs an accelerator, and runs with kernels that repeat."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload_strategy.activations import saved_tensor_hooks
from offload_strategy.store import reader
from offload_strategy.units import MiB
from tests.accelerator.support import DEVICE, device_module


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if DEVICE == "none":
        pytest.skip("needs CUDA, or TEST_ACCELERATOR=sim and a C++ compiler")


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    """Two plain runs must be the same before an offloaded one can be."""
    # The models are small: copies shall be many all the same.
    monkeypatch.setattr(saved_tensor_hooks, "DEVICE_BATCH_BYTES", 1 * MiB)
    monkeypatch.setattr(reader, "_TOGETHER", 1 * MiB)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(before)
    torch.accelerator.synchronize()  # an error of the device that nobody saw shows here
    device_module.empty_cache()
