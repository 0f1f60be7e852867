"""Fixtures of the tests of integrations and callbacks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload_strategy import OffloadEngine
from tests.integrations.lightning_runs import FAMILIES
from tests.integrations.support import OFFLOAD_ALL, OURS


@pytest.fixture(autouse=True)
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the default tier, in which nothing may remain, with a config to match."""
    path = tmp_path / "tier"
    path.mkdir()
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(path))
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", json.dumps(OFFLOAD_ALL))
    return path


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    if runs := sys.modules.get("tests.integrations.accelerate_runs"):
        runs.forget_accelerator()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of launches, with a clean environment."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The hints that engines are given."""
    given: list[tuple[int, bool]] = []
    original = OffloadEngine.microbatch

    def microbatch(self: OffloadEngine, index: int, *, last: bool) -> None:
        given.append((index, last))
        original(self, index, last=last)

    monkeypatch.setattr(OffloadEngine, "microbatch", microbatch)
    return given


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    """An install of Lightning: the first one, or what a test asks for with `in_both_installs`."""
    name: str = getattr(request, "param", FAMILIES[0])
    pytest.importorskip(name)
    return name


@pytest.fixture
def pl(family: str) -> Any:
    """One of the two installs of Lightning."""
    return pytest.importorskip(family)
