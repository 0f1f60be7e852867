"""The commands around files: configs, reports, launch files, and what is known of paths."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

from offload_strategy import OffloadConfig, cli
from offload_strategy.engine.run_report import RunReport
from offload_strategy.integrations.accelerate.launch import environment_for
from offload_strategy.io.bandwidth import history
from offload_strategy.plan_runtime import predicted_and_measured as prediction
from offload_strategy.plan_runtime.predicted_and_measured import Change
from offload_strategy.telemetry import Direction

pytestmark = pytest.mark.usefixtures("rates_cache")


# ---------------------------------------------------------------------------- configs
def test_show_prints_the_whole_config_with_defaults(ssd_offload, monkeypatch):
    shown = yaml.safe_load(ssd_offload("config", "show", "optimizer").out)
    assert OffloadConfig.load(shown) == OffloadConfig.load("optimizer")
    assert shown["activations"]["enabled"] is False
    assert shown["io"]["block_size"] == "32MiB"
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", '{"memory": {"pinned": "7MiB"}}')
    assert yaml.safe_load(ssd_offload("config", "show").out)["memory"]["pinned"] == "7MiB"


def test_check_accepts_a_good_file_and_refuses_a_wrong_one_with_one_message(ssd_offload, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("memory: {pinned: 7MiB}")
    assert ssd_offload("config", "check", file).out == f"{file}: ok\n"
    file.write_text("memory: {pined: 7MiB}")
    output = ssd_offload("config", "check", file, status=2)
    assert output.out == ""
    assert output.err.startswith("ssd-offload: file ")
    assert "did you mean 'memory.pinned'?" in output.err


def test_the_schema_is_printed_and_presets_are_listed_with_what_they_do(ssd_offload):
    assert json.loads(ssd_offload("config", "schema").out) == OffloadConfig.model_json_schema()
    lines = ssd_offload("config", "presets").out.splitlines()
    assert [line.split()[0] for line in lines] == ["activations", "full", "optimizer"]
    assert "whether or not they would fit in memory" in lines[1]


@pytest.mark.parametrize("words", ["", "config", "config frobnicate", "frobnicate"])
def test_an_unknown_command_ends_with_status_2(words, ssd_offload):
    assert "usage: ssd-offload" in ssd_offload(*words.split(), status=2).err


# ---------------------------------------------------------------------------- reports
def test_it_makes_a_page_of_a_run_and_prints_what_would_help(ssd_offload, tmp_path):
    pytest.importorskip("plotly")
    file, page = tmp_path / "run.json", tmp_path / "page.html"
    figure = prediction.ComparedFigure("step", 1.5, 3.0, "s", "slow")
    table = prediction.PredictionComparison((figure,), ("A remark.",))
    made = RunReport({}, "mode: auto", (), comparison=table, changes=(Change("a disk", 3.0, 2.0),))
    made.save(file)
    text = ssd_offload("report", file).out
    assert "| step | 1.500 s | 3.000 s | 2.00 | slow |" in text
    assert "- a disk: 2.000 s instead of 3.000 s" in text
    assert text.endswith(f"The page: {tmp_path / 'run.html'}\n")
    ssd_offload("report", file, "--html", page)
    assert page.read_bytes() == (tmp_path / "run.html").read_bytes()
    assert "--json is for what is known" in ssd_offload("report", file, "--json", status=2).err
    assert "name the RUN" in ssd_offload("report", "--html", page, status=2).err
    said = ssd_offload("report", tmp_path / "nowhere.json", status=2).err
    assert "nowhere.json cannot be read as the report of a run" in said
    assert "engine.report().save" in said


def test_without_a_file_it_prints_what_is_known_of_paths(ssd_offload, rates_cache, monkeypatch):
    nothing = f"Nothing is known of any path yet. It will be kept in {rates_cache}."
    assert nothing in ssd_offload("report").out
    date = "2026-01-02T03:04:05+00:00"
    rates = {
        Direction.READ: history.MeasuredRate(3.25e9, "observed", 2**40, 7, date),
        Direction.WRITE: history.MeasuredRate(1.5e9, "probe", 2**30),
    }
    history.save_rates(history.PathIdentity("node7", "/mnt/nvme0", 1, 4, "PosixBackend", 4), rates)
    text = ssd_offload("report").out
    assert "| /mnt/nvme0 | node7 | 4 | read | 3.25 | 7 runs | 1 TiB | 2026-01-02T03:04:05" in text
    assert "| /mnt/nvme0 | node7 | 4 | write | 1.5 | probe | 1 GiB |" in text
    (found,) = json.loads(ssd_offload("report", "--json").out)
    assert (found["path"], found["read"]["rate"]) == ("/mnt/nvme0", 3.25e9)
    monkeypatch.setenv(history.CACHE_VARIABLE, "")
    assert "Nothing is kept of paths" in ssd_offload("report").out


def test_only_the_program_of_a_process_keeps_its_imports_from_collection(ssd_offload, monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    ssd_offload("config", "schema")
    assert frozen == []
    monkeypatch.setattr(sys, "argv", ["ssd-offload", "config", "schema"])
    assert cli.program() == 0
    assert frozen == [True]


# ---------------------------------------------------------------------------- launch files
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
    assert init().out.endswith("\n    accelerate launch --config offload.yaml train.py\n")
    text = (tmp_path / "offload.yaml").read_text()
    assert "free memory" in text.partition("\n")[0]
    (line,) = [line for line in text.splitlines() if "GB/s" in line]
    assert "free, " in line
    ssd_offload("config", "check", "offload.yaml")
    (tier,) = [tier for tier in OffloadConfig.load("offload.yaml").tiers if tier.kind == "ssd"]
    assert tier.paths == [tmp_path]
    assert environment_for("offload.yaml")["ACCELERATE_USE_SSD_OFFLOAD"] == "true"
    accelerates = pytest.importorskip("accelerate.commands.config.config_args")
    launched = accelerates.load_config_from_file("offload.yaml")  # what training is launched with
    assert launched.num_processes == 1
    assert OffloadConfig.load(launched.ssd_offload_config).tiers[-1].paths == [tmp_path]
    # What is commented out is valid, too.
    for key in ("memory", "capacity", "endurance_tbw"):
        assert f"# {key}: " in text
        text = text.replace(f"# {key}: ", f"{key}: ")
    config = OffloadConfig.load(yaml.safe_load(text))
    assert config.tiers[-1].capacity
    assert config.tiers[-1].endurance_tbw == 600


def test_a_directory_may_have_any_name_in_a_launch_file(init, tmp_path, monkeypatch):
    directory = tmp_path / "it's: a # drive"
    directory.mkdir()
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(directory))
    init()
    assert OffloadConfig.load("offload.yaml").tiers[-1].paths == [directory]


def test_gpus_get_a_process_each_and_a_tier_of_host_memory(init, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    init()
    file = yaml.safe_load(Path("offload.yaml").read_text())
    expected = {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False}
    assert file | expected == file
    host, drive = OffloadConfig.load("offload.yaml").tiers
    assert (host.kind, drive.kind) == ("dram", "ssd")


def test_a_file_is_replaced_only_by_force(init, tmp_path, monkeypatch):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert "mine.yaml is there already; give --force" in init("mine.yaml", status=2).err
    assert file.read_text() == "mine"
    init("mine.yaml", "--force")
    OffloadConfig.load(file)
    refused = init("no/such.yaml", status=2).err
    assert "no/such.yaml cannot be written: its folder does not exist" in refused
    # Nor is anything written if no drive is found: below a file there is no directory.
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(file / "drive"))
    error = init(status=2).err
    assert "no directory can be used: " in error
    assert str(file / "drive") in error
    assert not Path("offload.yaml").exists()


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
