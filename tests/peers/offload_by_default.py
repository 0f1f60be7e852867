"""A pytest plugin: makes offload the default of a peer, and notes what came of each test.

Not part of our own tests: `python -m tests.peers` loads it into the processes of the peer's tests.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from peers import PEERS

_results = open(os.environ["PEER_RESULTS"], "a", buffering=1)  # noqa: SIM115  # kept by the process
_process = os.getpid()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything of the peer runs."""
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures; a test runs once here")
    if os.environ["PEER_OFFLOADS"] == "1":
        PEERS[os.environ["PEER"]].offload()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what will run: a process that dies has no reports of the rest."""
    _note(*({"test": item.nodeid, "outcome": "died"} for item in session.items))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the outcome; of a later phase, if that has failed."""
    if report.when == "call" or report.outcome != "passed":
        lines = report.longreprtext.strip().splitlines() if report.failed else []
        errors = [line[2:].strip() for line in lines if line.startswith("E  ")]
        note: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome}
        _note({**note, "when": report.when, "error": (errors or lines or [""])[-1][:300]})


def _note(*notes: dict[str, Any]) -> None:
    if os.getpid() == _process:  # not in forked children
        _results.write("".join(f"{json.dumps(note)}\n" for note in notes))
