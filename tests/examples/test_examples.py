"""Each example, small, as a user starts it: in a process of its own, from another folder."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.ranks import run_ranks
from tests.integrations.support import environment, python, succeeded

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
LAUNCH_FILE = ROOT / "configs" / "accelerate" / "offload.yaml"

SMALL = ["--steps=3", "--layers=2", "--width=64", "--context=32", "--batch=8"]
HARD = [*SMALL, "--accumulate=4", "--clip=1.0"]
OFFLOAD_ALL = {"activations": {"min_size": "1KiB"}}


def losses(printed: str) -> list[str]:
    """The losses in hexadecimal that an example printed."""
    found = re.findall(r"^ *\d+  loss (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return found


def tensorboard_scalars(folder: Path) -> dict[str, float]:
    """The last value of every scalar in the TensorBoard files below a folder."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars: dict[str, float] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = reader.EventAccumulator(str(file)).Reload()
        scalars |= {key: events.Scalars(key)[-1].value for key in events.Tags()["scalars"]}
    return scalars


def assert_moved(metrics: dict[str, float]) -> None:
    for client in ("activations", "optimizer"):
        assert metrics[f"offload/{client}/written_bytes"] > 0
        assert metrics[f"offload/{client}/read_bytes"] > 0
    assert 0 <= metrics["offload/transfer/hidden_share"] <= 1


# ---------------------------------------------------------------------- Lightning, the main job


# One test for what one process did: pytest-xdist would run it again for others.
def test_the_main_job_says_where_tensors_go_and_how_it_went(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    config = f"--config={json.dumps(OFFLOAD_ALL)}"
    script = str(EXAMPLES / "lightning_gpt.py")
    printed = succeeded(python(script, *SMALL, config, "--json=figures.json", home=tmp_path))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert f"tensors go to {tmp_path};" in printed
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
    ):
        assert label in printed
    assert "The first 3 losses are the same to the last bit." in printed
    assert_moved(figures["metrics"])
    # An untrained model, which learns.
    before, after = figures["validation_losses"]
    assert before == pytest.approx(5.545, abs=0.1)
    assert after < before
    scalars = tensorboard_scalars(tmp_path / "logs")
    assert {"train/loss", "validation/loss"} <= scalars.keys()
    assert_moved(scalars)
    assert {path.name for path in tmp_path.iterdir()} <= {"logs", "figures.json", "hf"}


def both_strategies(rank: int, directory: Path) -> None:
    """The main job as a module, with each strategy; in a process of `run_ranks`."""
    os.chdir(directory)
    os.environ.update(environment(directory), SSD_OFFLOAD_CONFIG=json.dumps(OFFLOAD_ALL))
    for strategy in ("auto", "ssd_offload"):
        options = ["--no-compare", f"--strategy={strategy}", f"--json={strategy}.json"]
        sys.argv = ["lightning_gpt", *HARD, *options]
        runpy.run_module("offload_strategy.examples.lightning_gpt", run_name="__main__")


def test_the_main_job_runs_as_a_module_and_the_models_are_equal(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run_ranks("tests.examples.test_examples:both_strategies", tmp_path, size=1, group=False)
    auto, ours = (
        json.loads((tmp_path / f"{strategy}.json").read_text())
        for strategy in ("auto", "ssd_offload")
    )
    assert_moved(ours["metrics"])
    assert len(auto["losses"]) == 12
    for key in ("losses", "validation_losses", "parameters_sha256"):
        assert auto[key] == ours[key]


# ---------------------------------------------------------------------- Accelerate, PyTorch


def test_accelerate_and_pytorch_give_the_same_losses_with_and_without_offload(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate")
    content = yaml.safe_load(LAUNCH_FILE.read_text())
    (tmp_path / "with.yaml").write_text(yaml.dump({**content, "ssd_offload_config": OFFLOAD_ALL}))
    script = [str(EXAMPLES / "accelerate_train.py"), *HARD, "--hex"]
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config", "with.yaml"]
    offloaded = python(*launcher, *script, "--logdir=with", home=tmp_path)
    cpu = {"ACCELERATE_USE_CPU": "true"}
    plain = python(*script, "--logdir=without", home=tmp_path, variables=cpu)
    expected = losses(succeeded(plain))
    assert len(expected) == 12
    assert losses(succeeded(offloaded)) == expected
    assert_moved(tensorboard_scalars(tmp_path / "with"))
    scalars = tensorboard_scalars(tmp_path / "without")
    assert scalars["train/loss"] == pytest.approx(float.fromhex(expected[-1]))
    assert not any(key.startswith("offload/") for key in scalars)

    loop = str(EXAMPLES / "pytorch_loop.py")
    config = f"--config={json.dumps(OFFLOAD_ALL)}"
    printed = succeeded(python(loop, *HARD, "--hex", config, home=tmp_path))
    assert losses(printed) == expected
    moved = dict(re.findall(r"^(offload/\S+) (\S+) MB$", printed, re.MULTILINE))
    assert float(moved["offload/activations/written_bytes"]) > 0
    assert float(moved["offload/optimizer/written_bytes"]) > 0


# ---------------------------------------------------------------------- the figures


def test_the_memory_benchmark_compares_every_loss_and_all_parameters(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script = str(ROOT / "benchmarks" / "demo_memory.py")
    printed = succeeded(python(script, "--repeats=1", *SMALL, home=tmp_path))
    assert "all 3 training losses: identical to the last bit" in printed
    assert re.search(r"all [\d,]+ parameters at the end: identical to the last bit", printed)
    assert re.search(r"ratio \d+\.\d+", printed)
