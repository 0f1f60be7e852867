"""`ssd-offload plan --profile` plans a step that was profiled, and replays it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_strategy.cli import main
from offload_strategy.plan_runtime.plan_file import load_plan
from tests.plan_runtime.profiles import stack


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    stack(10, nbytes=100_000_000, path=1e8).save(file)
    return str(file)


def plan(*words: str) -> int:
    return main(["plan", *words])


def test_it_prints_what_leaves_and_what_that_takes(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--profile", profile, "--device-memory", "600MB") == 0
    text = capsys.readouterr().out
    assert "| layer 0 | 95.4 MiB | disk | 1.000 s |" in text
    assert "Replayed: a step of 30.000 s, 30.000 s of it computing" in text
    assert "| disk write |" in text


def test_other_rates_than_the_profiles(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--profile", profile, "--device-memory", "300MB", "--json"]
    assert plan(*words) == 0
    fast = json.loads(capsys.readouterr().out)
    assert plan(*words, "--read", "0.02", "--write", "0.02") == 0
    slow = json.loads(capsys.readouterr().out)
    assert fast["replay"]["step_seconds"] == pytest.approx(30.0)
    assert slow["replay"]["step_seconds"] > 50
    assert all(move["hidden"] for move in fast["plan"]["moves"])
    assert not all(move["hidden"] for move in slow["plan"]["moves"])


def test_half_is_the_default_and_status_1_says_that_it_does_not_fit(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--profile", profile, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["limit"] == 500_000_000
    assert plan("--profile", profile, "--device-memory", "50MB") == 1


def test_it_writes_a_plan_to_read_and_to_change(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["--profile", profile, "--device-memory", "600MB"]
    assert plan(*words, "--write-plan", str(file)) == 0
    items = load_plan(file).items
    assert len(items) == 10
    assert 4 <= sum(item.leaves for item in items) < 10


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_it_draws_a_picture(profile: str, tmp_path: Path, name: str) -> None:
    assert plan("--profile", profile, "--picture", str(tmp_path / name)) == 0
    assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "/nowhere.json"], "/nowhere.json cannot be read as a profile"),
        (["--profile", "{}", "--device-memory", "much"], "--device-memory"),
        (["--profile", "{}", "--read", "0"], "--read is 0.0; give more than 0 GB/s"),
    ],
)
def test_what_is_wrong_is_said(
    profile: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*(profile if word == "{}" else word for word in words)) == 2
    assert said in capsys.readouterr().err
