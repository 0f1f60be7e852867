"""Every test of CUDA runs with kernels that repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.support import repeatable


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with repeatable():
        yield
