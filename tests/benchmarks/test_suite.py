"""The page of results is made from figures alone, and says what did not run or hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import __main__ as suite
from benchmarks.suite.page import write_page


# It has claims that hold and do not, in one run and in two, tables, parts that were skipped or not
# run, machines, and causes of distances from the roofline.
def test_the_page_in_the_repository_is_that_of_its_figures() -> None:
    copy = suite.PAGE.with_name(".results-as-rebuilt.md")
    try:
        write_page(suite.FIGURES, copy, suite.FIGURES / suite.SECOND)
        assert copy.read_text() == suite.PAGE.read_text()
    finally:
        copy.unlink(missing_ok=True)


class _Program:
    """One that ends with status 3 and writes nothing, after it was ended if it is slow."""

    slow = False
    ended = 0

    def __init__(self, command: list[str], **_: Any) -> None:
        assert "--json" in command

    def wait(self, timeout: float | None = None) -> int:
        if self.slow and timeout is not None:
            raise subprocess.TimeoutExpired("slow", timeout)
        return 3

    def terminate(self) -> None:
        _Program.ended += 1


@pytest.mark.parametrize("slow", [False, True])
def test_a_part_that_writes_nothing_fails_and_one_that_takes_too_long_is_ended(
    slow: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_Program, "slow", slow)
    monkeypatch.setattr(_Program, "ended", 0)
    monkeypatch.setattr(subprocess, "Popen", _Program)
    page = tmp_path / "page.md"
    words = ["--only", "io", "--quick", "--figures", str(tmp_path), "--out", str(page)]
    monkeypatch.setattr(sys, "argv", ["suite", *words])
    assert suite.main() == 1
    assert _Program.ended == slow
    assert ("io: ended after 2 minutes" in capsys.readouterr().err) is slow
    assert "Not run here" in page.read_text()
