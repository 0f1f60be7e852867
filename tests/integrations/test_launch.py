"""`accelerate launch` with a section in the launch file, and a script that knows nothing of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.callbacks.test_monitor import tensorboard_scalars
from tests.integrations.support import run, succeeded

SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(16, 32)
accelerator = Accelerator(log_with="tensorboard", project_dir=sys.argv[1])
accelerator.init_trackers("board")
model, optimizer = accelerator.prepare(model, optimizer)
losses = []
for step in range(12):
    loss = torch.nn.functional.mse_loss(model(x), x)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    accelerator.log({"loss": losses[-1]}, step=step)
accelerator.end_training()
print(json.dumps({
    "losses": [loss.hex() for loss in losses],
    "weights": [p.sum().item().hex() for p in model.parameters()],
    "arguments": sys.argv[1:],
    "optimizer": type(optimizer.optimizer).__name__,
}))
"""

SECTION = {"activations": {"min_size": "1KiB"}}
WRITTEN = "offload/activations/written_bytes"


def launch_file(home: Path, name: str, **more: Any) -> Path:
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "num_processes": 1,
        "num_machines": 1,
        "use_cpu": True,
        **more,
    }
    path = home / name
    path.write_text(yaml.safe_dump(content))
    return path


def launch(
    home: Path, arguments: Sequence[str], variables: dict[str, str] | None = None
) -> CompletedProcess[str]:
    # The console script's own entry point, without relying on where it was installed.
    command = [sys.executable, "-c", CONSOLE_SCRIPT, "launch", *arguments]
    return run(command, home=home, variables=variables)


CONSOLE_SCRIPT = """
import sys
from accelerate.commands.accelerate_cli import main
sys.argv[0] = "accelerate"
main()
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What came of a launch; each is made once, when it is first asked for."""
    home = tmp_path_factory.mktemp("launch")
    (home / "train.py").write_text(SCRIPT)
    (home / "presets").mkdir()
    launch_file(home, "plain.yaml")
    launch_file(home, "offload.yaml", ssd_offload_config=SECTION)
    (home / "presets" / "own.yaml").write_text(yaml.safe_dump(SECTION))
    launch_file(home / "presets", "by_path.yaml", ssd_offload_config="own.yaml")
    outer = {"SSD_OFFLOAD_CONFIG": '{"optimizer": {"enabled": false}}'}
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "plain": (["--config_file", "plain.yaml"], outer),
        "config_file": (["--config_file", "offload.yaml"], outer),
        "config": (["--config", "offload.yaml"], {}),
        "config=": (["--num_processes", "1", "--config=presets/by_path.yaml"], {}),
    }

    @cache
    def one(name: str) -> dict[str, Any]:
        options, variables = cases[name]
        script = ["train.py", f"logs-{name}", "--config", "of the script", "--config_file=its"]
        printed = succeeded(launch(home, [*options, *script], variables))
        return {
            **json.loads(printed.splitlines()[-1]),
            "scalars": tensorboard_scalars(home / f"logs-{name}" / "board"),
        }

    return one


@pytest.mark.parametrize("name", ["config_file", "config", "config="])
def test_a_section_offloads_and_changes_no_number(
    launched: Callable[[str], dict[str, Any]], name: str
) -> None:
    plain, offloaded = launched("plain"), launched(name)
    assert plain["optimizer"] == "AdamW"
    assert offloaded["optimizer"] == "OffloadedOptimizer"
    for key in ("losses", "weights"):
        assert offloaded[key] == plain[key]
    assert offloaded["arguments"][1:] == ["--config", "of the script", "--config_file=its"]


@pytest.mark.parametrize("name", ["config_file", "config", "config="])
def test_metrics_are_in_the_tensorboard_file_of_the_unmodified_script(
    launched: Callable[[str], dict[str, Any]], name: str
) -> None:
    assert set(launched("plain")["scalars"]) == {"loss"}
    scalars = launched(name)["scalars"]
    assert [step for step, _ in scalars[WRITTEN]] == [0, 10, 11]
    assert scalars[WRITTEN][-1][1] > 0
    assert len(scalars["loss"]) == 12


def test_the_module_started_with_dash_m_passes_the_section_on(tmp_path: Path) -> None:
    launch_file(tmp_path, "offload.yaml", ssd_offload_config=SECTION)
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--config_file", "offload.yaml", "train.py", "logs"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    printed = succeeded(run(command, home=tmp_path))
    assert json.loads(printed.splitlines()[-1])["optimizer"] == "OffloadedOptimizer"


@pytest.mark.parametrize(
    ("section", "more", "message"),
    [
        ({"optimzer": {}}, {}, "did you mean 'optimizer'?"),
        ("no-such-preset", {}, "'no-such-preset' is neither a file that exists nor a preset"),
        (SECTION, {"distributed_type": "MEGATRON_LM"}, "distributed_type is MEGATRON_LM"),
    ],
    ids=["typo", "preset", "megatron"],
)
def test_a_wrong_section_is_refused_before_the_script_starts(
    tmp_path: Path, section: Any, more: dict[str, Any], message: str
) -> None:
    launch_file(tmp_path, "offload.yaml", ssd_offload_config=section, **more)
    (tmp_path / "train.py").write_text("open('started', 'w').close()")
    result = launch(tmp_path, ["--config", "offload.yaml", "train.py"])
    assert result.returncode == 1
    assert not (tmp_path / "started").exists()
    (line,) = [line for line in result.stderr.splitlines() if "accelerate launch:" in line]
    assert message in line
    assert "offload.yaml" in line
    assert "ssd_offload_config" in line
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------- without processes


def test_the_section_survives_a_rewrite_of_the_launch_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = launch_file(tmp_path, "offload.yaml", ssd_offload_config=SECTION)
    load_config_from_file(str(path)).to_yaml_file(str(path))
    assert yaml.safe_load(path.read_text())["ssd_offload_config"] == SECTION
    plain = launch_file(tmp_path, "plain.yaml")
    load_config_from_file(str(plain)).to_yaml_file(str(plain))
    assert "ssd_offload_config" not in yaml.safe_load(plain.read_text())


def test_json_launch_files_may_have_a_section(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    from offload_strategy.integrations.accelerate.launch import environment_for

    path = tmp_path / "offload.json"
    path.write_text(json.dumps({"distributed_type": "NO", "ssd_offload_config": SECTION}))
    assert load_config_from_file(str(path)).ssd_offload_config == SECTION
    variables = environment_for(str(path))
    assert json.loads(variables["SSD_OFFLOAD_CONFIG"]) == SECTION
    assert variables["ACCELERATE_USE_SSD_OFFLOAD"] == "true"


def test_other_unknown_keys_are_still_refused(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = launch_file(tmp_path, "typo.yaml", ssd_ofload_config=SECTION)
    with pytest.raises(ValueError, match="ssd_ofload_config"):
        load_config_from_file(str(path))


def test_an_empty_section_means_the_defaults(tmp_path: Path) -> None:
    from offload_strategy.integrations.accelerate.launch import environment_for

    path = launch_file(tmp_path, "offload.yaml", ssd_offload_config=None)
    assert environment_for(str(path))["SSD_OFFLOAD_CONFIG"] == "{}"
    assert environment_for(str(launch_file(tmp_path, "plain.yaml"))) == {}
    assert environment_for(None) == {}
