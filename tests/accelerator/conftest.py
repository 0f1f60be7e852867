"""Every test of an accelerator runs with kernels that repeat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.support import DEVICE, repeatable


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    if DEVICE == "none":
        yield
        return
    with repeatable():
        yield
