"""Each example, small, as a user starts it: in a process of its own, from another folder."""

import contextlib
import io
import json
import os
import re
import runpy
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml

from offload_strategy.engine.run_report import RunReport
from offload_strategy.examples.corpus import read_corpus
from offload_strategy.examples.gpt import GPT, GPTConfig
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.distributed.ranks import run_ranks
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.support import OFFLOAD_ALL, environment, tensorboard_scalars
from tests.module_map import ROOT

LAUNCH_FILE = ROOT / "configs" / "accelerate" / "offload.yaml"
HARD = ["--steps=3", "--layers=2", "--width=64", "--context=32", "--batch=8"]
HARD += ["--accumulate=4", "--clip=1.0"]
CONFIG = f"--config={json.dumps(OFFLOAD_ALL)}"


def losses(printed):
    found = re.findall(r"^ *\d+  loss (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return found


def logged(folder):
    """The last value of every scalar in the TensorBoard files below a folder."""
    return {name: points[-1][1] for name, points in tensorboard_scalars(folder).items()}


def run_as_main(run, what, *arguments):
    """Run a script or a module; what it printed."""
    sys.argv = [what, *HARD, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run(what, run_name="__main__")
    return output.getvalue()


def assert_moved(metrics):
    for client in ("activations", "optimizer"):
        assert metrics[f"offload/{client}/written_bytes"] > 0
        assert metrics[f"offload/{client}/read_bytes"] > 0
    assert 0 <= metrics["offload/transfer/hidden_share"] <= 1


# ---------------------------------------------------------------------- Lightning, the main job
def main_job(rank, directory):
    """The main job by path, in a process of `run_ranks`; what it compares with has its own."""
    home = directory / "home"
    home.mkdir()
    os.chdir(home)
    os.environ.update(environment(home))
    script = str(ROOT / "examples" / "lightning_gpt.py")
    return run_as_main(runpy.run_path, script, CONFIG, "--json=figures.json")


# One test for what one process did: pytest-xdist would run it again for others.
def test_the_main_job_says_where_tensors_go_and_how_it_went(tmp_path):
    pytest.importorskip("lightning")
    (printed,) = run_ranks("tests.examples.test_examples:main_job", tmp_path, size=1, group=False)
    home = tmp_path / "home"
    figures = json.loads((home / "figures.json").read_text())
    assert f"tensors go to {home};" in printed
    labels = [
        "training loss", "validation loss", "tokens per second", "activations: written / read",
        "optimizer: written / read", "share of transfer time hidden", "peak memory",
        "mmap threshold", "What the model wrote", "tensorboard.main --logdir logs",
        "ssd-offload report logs/run.json",
    ]  # fmt: skip
    assert [label for label in labels if label not in printed] == []
    assert "The first 12 losses are the same to the last bit." in printed
    assert_moved(figures["metrics"])
    report = RunReport.load(home / "logs" / "run.json")
    assert_moved(dict(report.metrics))
    assert any(span.name.startswith("model.blocks.1") for span in report.timeline)
    # An untrained model, which learns.
    before, after = figures["validation_losses"]
    assert before == pytest.approx(5.545, abs=0.1)
    assert after < before
    scalars = logged(home / "logs")
    assert {"train/loss", "validation/loss"} <= scalars.keys()
    assert_moved(scalars)
    assert {path.name for path in home.iterdir()} <= {"logs", "figures.json", "hf"}


# ---------------------------------------------------------------------- Accelerate, PyTorch
def three_loops(rank, directory):
    """The loops of Accelerate and of PyTorch; what each printed, in a process of `run_ranks`."""
    os.chdir(directory)
    variables, printed = environment_for(str(directory / "with.yaml")), []
    for name, option, more in (
        ("accelerate_train", "--logdir=with", variables),
        ("accelerate_train", "--logdir=without", {}),
        ("pytorch_loop", CONFIG, {}),
    ):
        forget_accelerator()
        for variable in variables:
            os.environ.pop(variable, None)
        os.environ.update(environment(directory), ACCELERATE_USE_CPU="true", **more)
        module = f"offload_strategy.examples.{name}"
        printed.append(run_as_main(runpy.run_module, module, "--hex", option))
    return printed


def test_loops_give_the_same_losses_with_and_without_offload(tmp_path):
    content = yaml.safe_load(LAUNCH_FILE.read_text())
    (tmp_path / "with.yaml").write_text(yaml.dump({**content, "ssd_offload_config": OFFLOAD_ALL}))
    where = "tests.examples.test_examples:three_loops"
    (printed,) = run_ranks(where, tmp_path, size=1, group=False)
    offloaded, expected, own = map(losses, printed)
    assert len(expected) == 12
    assert offloaded == own == expected
    assert_moved(logged(tmp_path / "with"))
    scalars = logged(tmp_path / "without")
    assert scalars["train/loss"] == pytest.approx(float.fromhex(expected[-1]))
    assert not any(key.startswith("offload/") for key in scalars)
    moved = dict(re.findall(r"^(offload/\S+) (\S+) MB$", printed[2], re.MULTILINE))
    for client in ("activations", "optimizer"):
        assert float(moved[f"offload/{client}/written_bytes"]) > 0


# ---------------------------------------------------------------------- the figures
def test_the_memory_benchmark_compares_every_loss_and_all_parameters(monkeypatch, capsys):
    from benchmarks import demo_memory

    figures = {"parameters_sha256": "a", "allocator": "glibc", "config": "{}", "parameters": 7}
    figures |= {"losses": [3.0, 2.0], "validation_losses": [], "peak_bytes": 8}
    monkeypatch.setattr(demo_memory, "train", lambda *_: dict(figures))
    monkeypatch.setattr(sys, "argv", ["demo_memory", "--repeats=1", "--steps=2"])
    assert demo_memory.main() == 0
    assert "all 2 training losses: identical to the last bit" in capsys.readouterr().out
    losses = iter(([3.0, 2.0], [3.0, 1.0]))
    monkeypatch.setattr(demo_memory, "train", lambda *_: {**figures, "losses": next(losses)})
    assert demo_memory.main() == 1


# ---------------------------------------------------------------------- text and model
def test_the_corpus_is_large_repeatable_and_split_by_file():
    training, validation = read_corpus("train"), read_corpus("validation")
    assert len(training) > 2_000_000
    assert 0.02 < len(validation) / len(training) < 0.3
    assert torch.equal(validation, read_corpus("validation"))
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    found = [text in bytes(split.numpy()) for split in (training, validation)]
    assert sorted(found) == [False, True]


def test_a_python_without_sources_is_refused_with_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        read_corpus("train")


def test_the_model_sees_no_byte_that_is_yet_to_come_and_repeats_what_it_writes():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, context=16))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 7
    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])
    text = model.generate(b"def ", 20)
    assert len(text) == 20
    assert text == model.generate(b"def ", 20)
