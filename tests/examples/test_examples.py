"""Each example, small, as a user starts it: in a process of its own, from another folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from offload_strategy.engine.run_report import RunReport
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.distributed.ranks import run_ranks
from tests.integrations.accelerate_runs import forget_accelerator
from tests.integrations.support import OFFLOAD_ALL, environment, tensorboard_scalars

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
LAUNCH_FILE = ROOT / "configs" / "accelerate" / "offload.yaml"

SMALL = ["--steps=3", "--layers=2", "--width=64", "--context=32", "--batch=8"]
HARD = [*SMALL, "--accumulate=4", "--clip=1.0"]


def losses(printed: str) -> list[str]:
    """The losses in hexadecimal that an example printed."""
    found = re.findall(r"^ *\d+  loss (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return found


def logged(folder: Path) -> dict[str, float]:
    """The last value of every scalar in the TensorBoard files below a folder."""
    return {name: points[-1][1] for name, points in tensorboard_scalars(folder).items()}


def assert_moved(metrics: dict[str, float]) -> None:
    for client in ("activations", "optimizer"):
        assert metrics[f"offload/{client}/written_bytes"] > 0
        assert metrics[f"offload/{client}/read_bytes"] > 0
    assert 0 <= metrics["offload/transfer/hidden_share"] <= 1


# ---------------------------------------------------------------------- Lightning, the main job


def main_job(rank: int, directory: Path) -> str:
    """The main job by path, in a process of `run_ranks`; what it compares with has its own."""
    home = directory / "home"
    home.mkdir()
    os.chdir(home)
    os.environ.update(environment(home))
    script = EXAMPLES / "lightning_gpt.py"
    config = f"--config={json.dumps(OFFLOAD_ALL)}"
    sys.argv = [str(script), *HARD, config, "--json=figures.json"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


# One test for what one process did: pytest-xdist would run it again for others.
def test_the_main_job_says_where_tensors_go_and_how_it_went(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    where = "tests.examples.test_examples:main_job"
    (printed,) = run_ranks(where, tmp_path, size=1, group=False)
    home = tmp_path / "home"
    figures = json.loads((home / "figures.json").read_text())
    assert f"tensors go to {home};" in printed
    for label in (
        "training loss",
        "validation loss",
        "tokens per second",
        "activations: written / read",
        "optimizer: written / read",
        "share of transfer time hidden",
        "peak memory",
        "mmap threshold",
        "What the model wrote",
        "tensorboard.main --logdir logs",
        "ssd-offload report logs/run.json",
    ):
        assert label in printed
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


def three_loops(rank: int, directory: Path) -> list[str]:
    """The loops of Accelerate and of PyTorch; what each printed, in a process of `run_ranks`."""
    os.chdir(directory)
    variables = environment_for(str(directory / "with.yaml"))
    printed = []
    for name, options, more in (
        ("accelerate_train", ["--logdir=with"], variables),
        ("accelerate_train", ["--logdir=without"], {}),
        ("pytorch_loop", [f"--config={json.dumps(OFFLOAD_ALL)}"], {}),
    ):
        forget_accelerator()
        for variable in variables:
            os.environ.pop(variable, None)
        os.environ.update(environment(directory), ACCELERATE_USE_CPU="true", **more)
        sys.argv = [name, *HARD, "--hex", *options]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_module(f"offload_strategy.examples.{name}", run_name="__main__")
        printed.append(output.getvalue())
    return printed


def test_accelerate_and_pytorch_give_the_same_losses_with_and_without_offload(
    tmp_path: Path,
) -> None:
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
    assert float(moved["offload/activations/written_bytes"]) > 0
    assert float(moved["offload/optimizer/written_bytes"]) > 0


# ---------------------------------------------------------------------- the figures


def test_the_memory_benchmark_compares_every_loss_and_all_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import demo_memory

    figures = {
        **{"parameters_sha256": "a", "allocator": "glibc", "config": "{}", "parameters": 7},
        **{"losses": [3.0, 2.0], "validation_losses": [], "peak_bytes": 8},
    }
    monkeypatch.setattr(demo_memory, "train", lambda *_: dict(figures))
    monkeypatch.setattr(sys, "argv", ["demo_memory", "--repeats=1", "--steps=2"])
    assert demo_memory.main() == 0
    assert "all 2 training losses: identical to the last bit" in capsys.readouterr().out
    losses = iter(([3.0, 2.0], [3.0, 1.0]))
    monkeypatch.setattr(demo_memory, "train", lambda *_: {**figures, "losses": next(losses)})
    assert demo_memory.main() == 1
