"""The simulated accelerator is a process's only one, so these tests run where it was asked for."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def sim():
    if os.environ["TEST_ACCELERATOR"] != "sim":
        pytest.skip("needs the simulated accelerator: TEST_ACCELERATOR=sim")
    from tests.simulated_accelerator import sim as simulated

    return simulated
