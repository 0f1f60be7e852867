"""`ssd-offload plan SCRIPT` trains for a few passes, and plans them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offload_strategy.plan_runtime.profile import Profile

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


def plan(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload_strategy.cli", "plan", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_ends_the_script_and_plans_its_step(script: Path, tmp_path: Path) -> None:
    profile, steps = tmp_path / "profile.json", 1000
    found = plan(
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
    ],
)
def test_what_it_cannot_plan_is_said(
    script: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print('no engine')\n")
    known = {"script": script, "dir": tmp_path, "plain": plain}
    found = plan(*(word.format(**known) for word in words))
    assert found.returncode == 2
    assert said in found.stderr
    assert "Traceback" not in found.stderr
