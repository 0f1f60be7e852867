"""`ssd-offload plan --profile | SCRIPT` plans a step that was profiled, and replays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offload_strategy.cli import main
from offload_strategy.plan_runtime.lifetime_plan import CHECKPOINT, load_plan
from offload_strategy.plan_runtime.profile import Profile
from tests.plan_runtime.profiles import stack


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    stack(10, nbytes=100_000_000, path=1e8).save(file)
    return str(file)


def plan(*words: str) -> int:
    try:
        return main(["plan", *words])
    except SystemExit as ended:  # argparse's own errors
        return int(str(ended.code))


def test_it_prints_what_leaves_and_what_that_takes(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan("--profile", profile, "--device-memory", "600MB") == 0
    text = capsys.readouterr().out
    assert "| layer 0 | 95.4 MiB | disk | 1.000 s |" in text
    assert "Replayed: a step of 30.000 s, 30.000 s of it computing" in text
    assert "| disk write |" in text
    assert CHECKPOINT not in text


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
    assert CHECKPOINT in capsys.readouterr().out


def test_it_writes_a_plan_to_read_and_to_change(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["--profile", profile, "--device-memory", "600MB"]
    assert plan(*words, "--write-plan", str(file)) == 0
    items = load_plan(file).items
    assert len(items) == 10
    assert 4 <= sum(item.leaves for item in items) < 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "/nowhere.json"], "/nowhere.json cannot be read as a profile"),
        (["--profile", "{}", "--device-memory", "much"], "--device-memory"),
        (["--profile", "{}", "--read", "0"], "--read: '0' is not a number above 0"),
    ],
)
def test_what_is_wrong_is_said(
    profile: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*(profile if word == "{}" else word for word in words)) == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------ a script
_SCRIPT = """
import sys
import torch
from torch import nn
from offload_strategy import OffloadEngine

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
with OffloadEngine({"tiers": [{"name": "ssd", "kind": "ssd", "path": sys.argv[1]}],
                    "activations": {"min_size": 1}}) as engine:
    optimizer = engine.attach(model, torch.optim.AdamW(model.parameters()))
    for step in range(int(sys.argv[2])):
        print("step", step)
        try:
            model(torch.randn(16, 64)).square().mean().backward()
        except Exception:
            pass  # a script that catches every error
        optimizer.step()
        optimizer.zero_grad()
print("the end")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(_SCRIPT)
    return file


def plan_script(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload_strategy.cli", "plan", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_ends_the_script_and_plans_its_step(script: Path, tmp_path: Path) -> None:
    profile, steps = tmp_path / "profile.json", 1000
    found = plan_script(
        "--passes", 4, "--json", "--write-profile", profile, "--read", 1, "--write", 1,
        script, tmp_path, steps,
    )  # fmt: skip
    assert found.returncode in (0, 1), found.stderr
    assert "step 3" in found.stderr
    assert "step 5" not in found.stderr
    assert "the end" not in found.stderr
    assert json.loads(found.stdout)["replay"]["step_seconds"] > 0
    assert len(Profile.load(profile).tensors) >= 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.json", "train.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "missing.py is no file; give a training script"),
        (["--passes", "1", "{script}", "{dir}", "9"], "--passes is 1; give 2 or more"),
        (["{script}", "{dir}", "3"], "ended after 3 forward passes with an engine; 8 and"),
        (["{plain}"], "ended without a forward pass of a model that an offload engine"),
        (["--model", "gpt2", "{plain}"], "--model: no effect with a script"),
    ],
)
def test_a_script_that_cannot_be_planned_is_said(
    script: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print('no engine')\n")
    known = {"script": script, "dir": tmp_path, "plain": plain}
    assert plan(*(word.format(**known) for word in words)) == 2
    assert said in capsys.readouterr().err
