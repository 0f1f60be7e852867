"""A pytest plugin: makes offload the default of a peer, and notes what came of each test.

The losses of all backward passes of a test are noted as one digest: with offload they must be the
same, whatever the test itself asserts. Random numbers are seeded before each test.

Not part of our own tests: `python -m tests.peers` loads it into the processes of the peer's tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from peers import PEERS

_results = open(os.environ["PEER_RESULTS"], "a", buffering=1)  # noqa: SIM115  # kept by the process
_process = os.getpid()
_losses: list[str] = []
_moved: Counter[str] = Counter()
_backward = torch.Tensor.backward


def _count_moves() -> None:
    """Count the bytes of each test that were written or read: did anything leave?"""
    from offload_strategy.telemetry import Recorder

    finished = Recorder.move_finished

    def counting(self: Any, record: Any, *, completed: bool) -> None:
        _moved[record.client] += record.nbytes * completed
        finished(self, record, completed=completed)

    Recorder.move_finished = counting  # type: ignore[method-assign]


def _noting_backward(self: torch.Tensor, *args: Any, **options: Any) -> None:
    values = self.detach().double().flatten().tolist()
    _losses.append(repr(values))
    _backward(self, *args, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Before anything of the peer runs."""
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures; a test runs once here")
    if os.environ["PEER_OFFLOADS"] == "1":
        PEERS[os.environ["PEER"]].offload()
        _count_moves()
    torch.Tensor.backward = _noting_backward  # type: ignore[assignment,method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin with the same random numbers, with offload and without."""
    _losses.clear()
    _moved.clear()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what will run: a process that dies has no reports of the rest."""
    _note(*({"test": item.nodeid, "outcome": "died"} for item in session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome; of a later phase, if that has failed."""
    if report.when == "call" or report.outcome != "passed":
        lines = report.longreprtext.strip().splitlines() if report.failed else []
        errors = [line[2:].strip() for line in lines if line.startswith("E  ")]
        note: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome}
        note |= {"when": report.when, "error": (errors or lines or [""])[-1][:300]}
        digest = hashlib.sha256("".join(_losses).encode()).hexdigest()[:16]
        _note({**note, "losses": len(_losses), "digest": digest, "moved": dict(_moved)})


def _note(*notes: dict[str, Any]) -> None:
    if os.getpid() == _process:  # not in forked children
        _results.write("".join(f"{json.dumps(note)}\n" for note in notes))
