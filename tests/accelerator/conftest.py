"""Every test of an accelerator runs with kernels that repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload_strategy.activations import saved_tensor_hooks
from offload_strategy.store import reader
from offload_strategy.units import MiB
from tests.accelerator.support import DEVICE, repeatable


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "none":
        yield
        return
    # The models are small: copies shall be many all the same.
    monkeypatch.setattr(saved_tensor_hooks, "DEVICE_BATCH_BYTES", 1 * MiB)
    monkeypatch.setattr(reader, "_TOGETHER", 1 * MiB)
    with repeatable():
        yield
