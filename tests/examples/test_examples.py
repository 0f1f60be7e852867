"""Each example, small, as a user starts it: in a process of its own, from another folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """The folder, output and figures of the main job."""
    pytest.importorskip("lightning")
    home = tmp_path_factory.mktemp("demo")
    config = f"--config={json.dumps(OFFLOAD_ALL)}"
    script = str(EXAMPLES / "lightning_gpt.py")
    printed = succeeded(python(script, *SMALL, config, "--json=figures.json", home=home))
    return home, printed, json.loads((home / "figures.json").read_text())


def test_the_main_job_says_where_tensors_go_and_how_it_went(
    demo: tuple[Path, str, dict[str, Any]],
) -> None:
    home, printed, figures = demo
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
    ):
        assert label in printed
    assert "The first 3 losses are the same to the last bit." in printed
    assert_moved(figures["metrics"])


def test_the_main_job_starts_as_an_untrained_model_and_learns(
    demo: tuple[Path, str, dict[str, Any]],
) -> None:
    before, after = demo[2]["validation_losses"]
    assert before == pytest.approx(5.545, abs=0.1)
    assert after < before


def test_the_main_job_logs_the_metrics_to_tensorboard(
    demo: tuple[Path, str, dict[str, Any]],
) -> None:
    scalars = tensorboard_scalars(demo[0] / "logs")
    assert {"train/loss", "validation/loss"} <= scalars.keys()
    assert_moved(scalars)


def test_the_main_job_leaves_nothing_but_its_logs(demo: tuple[Path, str, dict[str, Any]]) -> None:
    assert {path.name for path in demo[0].iterdir()} <= {"logs", "figures.json", "hf"}


def test_the_main_job_runs_as_a_module_and_the_models_are_equal(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    module = ["-m", "offload_strategy.examples.lightning_gpt", *HARD, "--no-compare"]
    figures = {}
    for strategy in ("auto", "ssd_offload"):
        file = tmp_path / f"{strategy}.json"
        options = [f"--strategy={strategy}", f"--json={file}"]
        variables = {"SSD_OFFLOAD_CONFIG": json.dumps(OFFLOAD_ALL)}
        succeeded(python(*module, *options, home=tmp_path, variables=variables))
        figures[strategy] = json.loads(file.read_text())
    assert_moved(figures["ssd_offload"]["metrics"])
    assert len(figures["auto"]["losses"]) == 12
    for key in ("losses", "validation_losses", "parameters_sha256"):
        assert figures["auto"][key] == figures["ssd_offload"][key]


# ---------------------------------------------------------------------- Accelerate, PyTorch


def launch(home: Path, *launcher: str) -> str:
    """Run the Accelerate example through its launcher and return what it printed."""
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
    script = [str(EXAMPLES / "accelerate_train.py"), *HARD, "--hex", f"--logdir={home}"]
    result = subprocess.run(
        [*accelerate, "launch", *launcher, *script],
        cwd=home.parent,
        env=environment(home.parent),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return succeeded(result)


def test_accelerate_and_pytorch_give_the_same_losses_with_and_without_offload(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate")
    content = yaml.safe_load(LAUNCH_FILE.read_text())
    assert "ssd_offload_config" in content
    without = {key: value for key, value in content.items() if key != "ssd_offload_config"}
    (tmp_path / "with.yaml").write_text(yaml.dump({**content, "ssd_offload_config": OFFLOAD_ALL}))
    (tmp_path / "without.yaml").write_text(yaml.dump(without))
    folders = {}
    printed = {}
    for name, option, file in (
        ("config", "--config", "with.yaml"),
        ("config_file", "--config_file", "with.yaml"),
        ("without", "--config_file", "without.yaml"),
    ):
        folders[name] = tmp_path / name
        printed[name] = launch(folders[name], option, str(tmp_path / file))

    expected = losses(printed["without"])
    assert len(expected) == 12
    assert losses(printed["config"]) == expected
    assert losses(printed["config_file"]) == expected

    for name in ("config", "config_file"):
        assert_moved(tensorboard_scalars(folders[name]))
    scalars = tensorboard_scalars(folders["without"])
    assert scalars["train/loss"] == pytest.approx(float.fromhex(expected[-1]))
    assert not any(key.startswith("offload/") for key in scalars)

    script = str(EXAMPLES / "pytorch_loop.py")
    config = f"--config={json.dumps(OFFLOAD_ALL)}"
    loop = succeeded(python(script, *HARD, "--hex", config, home=tmp_path))
    assert losses(loop) == expected
    moved = dict(re.findall(r"^(offload/\S+) (\S+) MB$", loop, re.MULTILINE))
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
