"""The simulated accelerator is a process's only one, so it is imported where it is asked for."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="session")
def sim(request):
    if request.config.getoption("--accelerator") != "sim":
        pytest.skip("needs the simulated accelerator: --accelerator sim")
    if not (shutil.which("c++") and shutil.which("ninja")):
        pytest.skip("the simulated accelerator is compiled, and there is no c++ or no ninja")
    from tests.simulated_accelerator import sim as simulated

    return simulated
