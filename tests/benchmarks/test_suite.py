"""The page of results is made from figures alone, and says what did not run or hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import __main__ as suite
from benchmarks.suite.page import write_page
from benchmarks.suite.parts import PARTS

CLAIM: dict[str, Any] = {
    "name": "70M: speed", "ours": 2.0, "peer": 1.0, "unit": "s", "ratio": 2.0, "threshold": 1.8,
    "at_least": True, "judged": True, "held": True,
}  # fmt: skip


def figures(**more: Any) -> dict[str, Any]:
    return {"machine": {"cores": 2, "torch": "2.13.0"}, "results": [CLAIM], **more}


def page(tmp_path: Path, **parts: dict[str, Any]) -> str:
    folder = tmp_path / "figures"
    folder.mkdir()
    for name, found in parts.items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    write_page(folder, tmp_path / "page.md")
    return (tmp_path / "page.md").read_text()


def row(name: str, distance: float) -> dict[str, Any]:
    return {
        "name": name, "seconds": distance, "best": 1.0, "distance": distance,
        "limit": "computing", "cause": "waits",
    }  # fmt: skip


def test_the_page_says_what_was_found_what_did_not_hold_and_what_did_not_run(
    tmp_path: Path,
) -> None:
    lost = {**CLAIM, "name": "70M: memory", "held": False}
    io = figures(
        results=[CLAIM, lost], texts={"bulk": "| a table |"}, skipped={"fio": "no fio\nmore"}
    )
    roofline = figures(results=[], roofline=[row("near", 1.1), row("far", 1.5)])
    text = page(tmp_path, io=io, contenders=roofline)
    assert "**1 of 2 claims hold.**" in text
    assert "| 70M: speed | 2 | 1 | s | 2.000 | ≥ 1.8 | held |" in text
    assert "| ≥ 1.8 | **not held** |" in text
    assert "### bulk\n\n| a table |" in text
    assert "cores: 2, torch: 2.13.0." in text
    assert "skipped: fio: no fio\n" in text
    by_default = {part.name for part in PARTS if not part.asked}
    assert text.count("Not run here") == len(by_default - {"io", "contenders"})
    for part in {part.name for part in PARTS} - by_default:
        assert f"python -m benchmarks.suite --only {part}" in text
    # Causes are named far from the roofline.
    assert "| far | 1.500 | 1.000 | 1.50 | computing | waits |" in text
    assert "| near | 1.100 | 1.000 | 1.10 | computing |  |" in text
    assert text.index("| far |") < text.index("| near |")


def test_a_second_run_is_compared_with_the_first_and_marked_where_it_differs(
    tmp_path: Path,
) -> None:
    near, far = {**CLAIM, "name": "near"}, {**CLAIM, "name": "far"}
    for name, ratio in (("first", 2.0), ("second", 1.7)):
        (tmp_path / name).mkdir()
        results = [near, {**far, "ratio": ratio}, {**CLAIM, "name": name}]
        (tmp_path / name / "io.json").write_text(json.dumps(figures(results=results)))
    write_page(tmp_path / "first", tmp_path / "page.md", tmp_path / "second")
    text = (tmp_path / "page.md").read_text()
    assert "Of 2 ratios that were measured in two runs 1 are within\n10%" in text
    assert "| near | 2 | 1 | s | 2.000 | ≥ 1.8 | held | 2.000 |" in text
    assert "| far | 2 | 1 | s | 2.000 | ≥ 1.8 | held | 1.700, **-15%** |" in text
    assert "| first | 2 | 1 | s | 2.000 | ≥ 1.8 | held | |" in text


def test_the_page_in_the_repository_is_that_of_its_figures(tmp_path: Path) -> None:
    if not suite.PAGE.exists():
        pytest.skip("there is none yet")
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
