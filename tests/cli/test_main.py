"""The command line says what a config means, and what is wrong with one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from offload_strategy.cli import main
from offload_strategy.config import OffloadConfig


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
    assert "Move everything" in lines[1]


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
