"""`ssd-offload plan --profile | SCRIPT` plans a step that was profiled, and replays it."""

import json
from dataclasses import replace

import pytest

from offload_strategy.plan_runtime.lifetime_plan import CHECKPOINT, load_plan
from offload_strategy.plan_runtime.profile import Profile
from tests.integrations.support import python
from tests.plan_runtime.profiles import stack


@pytest.fixture
def profile(tmp_path):
    stack(10, nbytes=100_000_000, path=1e8).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


@pytest.fixture
def plan(ssd_offload, profile):
    def run(*words, status=0):
        return ssd_offload("plan", "--profile", profile, *words, status=status).out

    return run


def test_it_prints_what_leaves_and_what_that_takes_and_writes_a_plan_to_change(plan, tmp_path):
    file = tmp_path / "plan.json"
    text = plan("--device-memory", "600MB", "--write-plan", file)
    assert "| layer 0 | 95.4 MiB | disk | 1.000 s |" in text
    assert "Replayed: a step of 30.000 s, 30.000 s of it computing" in text
    assert "| disk write |" in text
    assert CHECKPOINT not in text
    items = load_plan(file).items
    assert len(items) == 10
    assert 4 <= sum(item.does == "leaves" for item in items) < 10


@pytest.mark.parametrize(
    ("rates", "least", "most"), [("", 30.0, 30.1), ("--read 0.02 --write 0.02", 50, 1000)]
)
def test_other_rates_than_the_profiles(plan, rates, least, most):
    found = json.loads(plan("--device-memory", "300MB", "--json", *rates.split()))
    assert least <= found["replay"]["step_seconds"] < most
    assert all(move["hidden"] for move in found["plan"]["moves"]) == (not rates)


def test_half_is_the_default_and_status_1_says_that_it_does_not_fit(plan):
    assert json.loads(plan("--json"))["plan"]["limit"] == 500_000_000
    assert CHECKPOINT in plan("--device-memory", "50MB", status=1)


def test_less_is_planned_for_where_the_c_library_keeps_freed_memory(plan, profile):
    words = ("--device-memory", "600MB")
    assert json.loads(plan(*words, "--json"))["plan"]["limit"] == 591_000_000
    replace(Profile.load(profile), keeps_freed=True).save(profile)
    assert json.loads(plan(*words, "--json"))["plan"]["limit"] == 528_000_000
    assert "Of the 572.2 MiB given, 503.5 MiB are planned for." in plan(*words)


# ------------------------------------------------------------------ a script
SCRIPT = """
import sys
import torch
from torch import nn
from offload_strategy import OffloadEngine

model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
tiers = [{"name": "ssd", "kind": "ssd", "path": sys.argv[1]}]
with OffloadEngine({"tiers": tiers, "activations": {"min_size": 1}}) as engine:
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
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_it_ends_the_script_and_plans_its_step(script, tmp_path):
    profile = tmp_path / "profile.json"
    words = f"--passes 4 --json --write-profile {profile} --read 1 --write 1 {script} {tmp_path}"
    found = python("-m", "offload_strategy.cli", "plan", *words.split(), "1000", home=tmp_path)
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
        ("--profile /nowhere.json", "/nowhere.json cannot be read as a profile"),
        ("--profile {profile} --device-memory much", "--device-memory"),
        ("--profile {profile} --read 0", "--read: '0' is not a number above 0"),
        ("missing.py", "missing.py is no file; give a training script"),
        ("--passes 1 {script} {dir} 9", "--passes is 1; give 2 or more"),
        ("{script} {dir} 3", "ended after 3 forward passes with an engine; 8 and"),
        ("{plain}", "ended without a forward pass of a model that an offload engine"),
        ("--model gpt2 {plain}", "--model: no effect with a script"),
        ("--profile {profile} --machines 3 --dir /", "--machines, --dir: no effect with --profile"),
        ("gpt2 --profile {profile}", "--model: no effect with --profile"),
    ],
)
def test_what_cannot_be_planned_is_said(words, said, profile, script, tmp_path, ssd_offload):
    plain = tmp_path / "plain.py"
    plain.write_text("print('no engine')\n")
    known = {"profile": profile, "script": script, "dir": tmp_path, "plain": plain}
    words = [word.format(**known) for word in words.split()]
    assert said in ssd_offload("plan", *words, status=2).err
