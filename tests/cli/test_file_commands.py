"""The commands around files: configs, reports of runs, and what is known of paths."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from offload_strategy.cli import main
from offload_strategy.config import OffloadConfig
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
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSD_OFFLOAD_CONFIG", raising=False)


def test_show_prints_the_whole_config_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "optimizer"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert OffloadConfig.load(shown) == OffloadConfig.load("optimizer")
    assert shown["activations"]["enabled"] is False
    assert shown["io"]["block_size"] == "32MiB"


def test_show_without_a_source_follows_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"memory": {"pinned": "7MiB"}}')
    assert main(["config", "show"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["memory"]["pinned"] == "7MiB"


def test_check_accepts_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("memory: {pinned: 7MiB}")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"


def test_check_refuses_a_wrong_file_with_status_2_and_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("memory: {pined: 7MiB}")
    assert main(["config", "check", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("ssd-offload: file ")
    assert "did you mean 'memory.pinned'?" in output.err


def test_schema_prints_the_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == OffloadConfig.model_json_schema()


def test_presets_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["activations", "full", "optimizer"]
    assert "whether or not they would fit in memory" in lines[1]


@pytest.mark.parametrize("words", [[], ["config"], ["config", "frobnicate"], ["frobnicate"]])
def test_an_unknown_command_ends_with_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: ssd-offload" in capsys.readouterr().err


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload_strategy.cli", "config", "check", "no-such-file.yaml"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 2
    assert "neither a file that exists nor a preset" in done.stderr


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
