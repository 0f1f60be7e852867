"""A peer that dies takes nobody with it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks.io.results import Context
from benchmarks.optimizer import session
from benchmarks.optimizer.contenders import DEEPSPEED, PLAIN
from benchmarks.optimizer.tasks import TINY, RandomTokens

STEP = {"seconds": 1.0, "peak_bytes": 5, "anonymous_bytes": 4, "loss": "0x1p0", "norm": None}


class _Probe:
    def measure(self, disk: session.Disk) -> None:
        disk.reads.append(1.0)
        disk.writes.append(1.0)


class _Subject:
    def __init__(self, lives: int) -> None:
        self.lives = lives

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.lives -= 1
        if self.lives < 0:
            raise RuntimeError("ended with status -9")
        return {"steps": [STEP] * request["steps"]}


def run(lives: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> session.Outcome:
    monkeypatch.setattr(session, "_Probe", lambda directory: nullcontext(_Probe()))
    monkeypatch.setattr(session, "start", lambda stack, name, *_, **__: (_Subject(lives[name]), 7))
    contenders = {name: {"contender": name} for name in lives}
    context = Context(tmp_path, 3, True, lambda text: None)
    return session.run(contenders, RandomTokens(TINY), context)


def test_one_of_ours_that_dies_ends_the_session_and_a_peer_that_dies_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = run({PLAIN: 9, DEEPSPEED: 2}, monkeypatch, tmp_path)
    assert list(outcome.rows) == [PLAIN]
    assert len(outcome.rows[PLAIN].steps) == 3
    assert outcome.skipped == {DEEPSPEED: "ended with status -9"}
    with pytest.raises(RuntimeError, match="status -9"):
        run({PLAIN: 2, DEEPSPEED: 9}, monkeypatch, tmp_path)
