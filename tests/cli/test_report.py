"""`ssd-offload report` prints what an engine wrote, and what is known of paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_strategy.cli import main
from offload_strategy.io.bandwidth.history import (
    CACHE_VARIABLE,
    MeasuredRate,
    PathIdentity,
    save_rates,
)
from offload_strategy.plan_runtime.predicted_and_measured import (
    ComparedFigure,
    PredictionComparison,
)
from offload_strategy.telemetry import Direction


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> str:
    made = PredictionComparison((ComparedFigure("step", 1.5, 3.0, "s", "slow"),), ("A remark.",))
    made.save(tmp_path / "run.json")
    return str(tmp_path / "run.json")


def test_it_prints_the_table_of_a_run(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", file]) == 0
    assert "| step | 1.500 s | 3.000 s | 2.00 | slow |" in capsys.readouterr().out
    assert main(["report", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["ratio"] == 2.0


def test_a_file_that_is_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere.json")]) == 2
    assert (
        "nowhere.json cannot be read as a comparison with a prediction" in capsys.readouterr().err
    )


def test_without_a_file_it_prints_what_is_known_of_paths(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report"]) == 0
    assert f"Nothing is known of any path yet. It will be kept in {cache}." in (
        capsys.readouterr().out
    )
    save_rates(
        PathIdentity("node7", "/mnt/nvme0", 1, 4, "PosixBackend", 4),
        {
            Direction.READ: MeasuredRate(3.25e9, "observed", 2**40, 7, "2026-01-02T03:04:05+00:00"),
            Direction.WRITE: MeasuredRate(1.5e9, "probe", 2**30),
        },
    )
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    assert "| /mnt/nvme0 | node7 | 4 | read | 3.25 | 7 runs | 1 TiB | 2026-01-02T03:04:05" in text
    assert "| /mnt/nvme0 | node7 | 4 | write | 1.5 | probe | 1 GiB |" in text
    assert main(["report", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["path"] == "/mnt/nvme0"
    assert found["read"]["rate"] == 3.25e9


def test_where_nothing_is_kept_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert main(["report"]) == 0
    assert "Nothing is kept of paths" in capsys.readouterr().out
