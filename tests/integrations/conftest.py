"""Fixtures of the tests of integrations and callbacks."""

import json
import os
import sys

import pytest

from offload_strategy import OffloadEngine
from tests.integrations.lightning_runs import FAMILIES
from tests.integrations.support import OFFLOAD_ALL, OURS


@pytest.fixture(autouse=True)
def tier(tmp_path, monkeypatch):
    """The directory of the default tier, in which nothing may remain, with a config to match."""
    path = tmp_path / "tier"
    path.mkdir()
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(path))
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", json.dumps(OFFLOAD_ALL))
    return path


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    yield
    if runs := sys.modules.get("tests.integrations.accelerate_runs"):
        runs.forget_accelerator()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The working directory of launches, with a clean environment."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.fixture
def hints(monkeypatch):
    """The hints that engines are given: whether a micro-batch is the last of its step."""
    given = []
    original = OffloadEngine.microbatch

    def microbatch(self, index, *, last):
        given.append(last)
        original(self, index, last=last)

    monkeypatch.setattr(OffloadEngine, "microbatch", microbatch)
    return given


@pytest.fixture
def family(request):
    """An install of Lightning: the first one, or what a test asks for with `in_both_installs`."""
    name = getattr(request, "param", FAMILIES[0])
    pytest.importorskip(name)
    return name


@pytest.fixture
def pl(family):
    return pytest.importorskip(family)
