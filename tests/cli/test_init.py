"""`ssd-offload init` writes a launch file for this machine, or adds its section to one."""

from pathlib import Path

import pytest
import torch
import yaml

from offload_strategy import OffloadConfig
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.integrations.support import python, succeeded

ACCELERATE = """\
# What `accelerate config` wrote.
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
num_processes: 1  # one of them
use_cpu: true
"""
AFTER = "# The end.\nmain_training_function: main\n"


@pytest.fixture
def init(ssd_offload, tmp_path, monkeypatch):
    """Runs the command in a folder, where the drive is, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    return lambda *words, status=0: ssd_offload("init", *words, status=status)


def test_it_writes_a_launch_file_that_is_valid_and_says_how_to_launch(init, ssd_offload, tmp_path):
    printed = init().out
    assert printed.endswith("\n    accelerate launch --config offload.yaml train.py\n")
    text = (tmp_path / "offload.yaml").read_text()
    assert "free memory" in text.partition("\n")[0]
    (line,) = [line for line in text.splitlines() if "GB/s" in line]
    assert "free, " in line
    ssd_offload("config", "check", "offload.yaml")
    (tier,) = [tier for tier in OffloadConfig.load("offload.yaml").tiers if tier.kind == "ssd"]
    assert tier.paths == [tmp_path]
    assert environment_for("offload.yaml")["ACCELERATE_USE_SSD_OFFLOAD"] == "true"
    # What is commented out is valid, too.
    for key in ("memory", "capacity", "endurance_tbw"):
        assert f"# {key}: " in text
        text = text.replace(f"# {key}: ", f"{key}: ")
    config = OffloadConfig.load(yaml.safe_load(text))
    assert config.tiers[-1].capacity
    assert config.tiers[-1].endurance_tbw == 600


def test_gpus_get_a_process_each_and_a_tier_of_host_memory(init, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    init()
    file = yaml.safe_load(Path("offload.yaml").read_text())
    assert (file["distributed_type"], file["num_processes"], file["use_cpu"]) == (
        "MULTI_GPU", 2, False,
    )  # fmt: skip
    host, drive = OffloadConfig.load("offload.yaml").tiers
    assert (host.kind, drive.kind) == ("dram", "ssd")


def test_the_line_that_it_says_trains(init, tmp_path):
    pytest.importorskip("accelerate")
    init()
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "net = torch.nn.Linear(4, 4)\n"
        "net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))\n"
        "accelerator.backward(net(torch.ones(2, 4)).sum())\n"
        "optimizer.step()\n"
        "print(accelerator._ssd_offload_session.engine.config.tiers[0].path)\n"
    )
    main = "from accelerate.commands.accelerate_cli import main; main()"
    words = ["launch", "--config", "offload.yaml", "train.py"]
    assert str(tmp_path) in succeeded(python("-c", main, *words, home=tmp_path))


def test_a_file_is_replaced_only_by_force(init, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert "mine.yaml is there already; give --force" in init("mine.yaml", status=2).err
    assert file.read_text() == "mine"
    init("mine.yaml", "--force")
    OffloadConfig.load(file)
    assert "is no file in a directory that you can write to" in init("no/such.yaml", status=2).err


def test_a_section_is_added_or_replaced_by_force_and_the_rest_of_the_file_stays(init, tmp_path):
    file = tmp_path / "launch.yaml"
    own = "ssd_offload_config:\n  # mine\n  activations: {min_size: 1KiB}\n\n"
    for before, force in ((ACCELERATE + AFTER, []), (ACCELERATE + own + AFTER, ["--force"])):
        file.write_text(before)
        if force:
            said = init("--into", "launch.yaml", status=2).err
            assert "has a section ssd_offload_config already" in said
            assert file.read_text() == before
        printed = init("--into", "launch.yaml", *force).out
        assert "accelerate launch --config launch.yaml train.py" in printed
        text = file.read_text()
        assert text.startswith(ACCELERATE + AFTER)
        assert "mine" not in text
        kept = yaml.safe_load(ACCELERATE + AFTER)
        assert {key: value for key, value in yaml.safe_load(text).items() if key in kept} == kept
        assert OffloadConfig.load(file).tiers[0].paths == [tmp_path]
    assert not (tmp_path / "offload.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.yaml", None, "no.yaml cannot be read as YAML"),
        ("list.yaml", "- 1\n", "list.yaml is no YAML file of `accelerate config`"),
        ("odd.yaml", "a: [\n", "odd.yaml cannot be read as YAML"),
        ("launch.json", "{}", "launch.json is no YAML file of `accelerate config`"),
    ],
)
def test_what_is_no_launch_file_is_refused(init, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert message in init("--into", name, status=2).err
    assert not (tmp_path / name).exists() or (tmp_path / name).read_text() == text


def test_without_a_directory_it_says_what_is_wrong(init, tmp_path, monkeypatch):
    missing = tmp_path / "missing" / "drive"
    (tmp_path / "missing").write_text("")  # no directory can be made below a file
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(missing))
    error = init(status=2).err
    assert "no directory can be used: " in error
    assert str(missing) in error
    assert not Path("offload.yaml").exists()
