"""Scripts that import nothing of ours, with the launch file or one flag and without.

Those of the Trainers also name loggers, in `report_to`.

    SSD_OFFLOAD_SCRIPTS_TABLE=table.md pytest tests/integrations/test_unmodified_scripts.py

writes the table of `docs/training_scripts.md`.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config.config_args import load_config_from_file

from offload_strategy import ConfigError, OffloadConfig
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.integrations.support import python, succeeded, tensorboard_scalars

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "examples" / "unmodified"
DOCUMENT = ROOT / "docs" / "training_scripts.md"

LAUNCHED = "`accelerate launch --config offload.yaml`"
_LAUNCHED = ("transformers_trainer", "trl_sft", "trl_dpo", "peft_lora", "accelerate_loop")
CHANGES = {f"{name}.py": LAUNCHED for name in _LAUNCHED}
CHANGES["lightning_cli.py"] = "`--trainer.strategy=ssd_offload`"
REPORTING = ("transformers_trainer.py", "trl_sft.py")
WRITTEN = "offload/optimizer/written_bytes"
RATES = {
    *(f"offload/bandwidth/{way}_GBps" for way in ("read", "write")),
    *(f"offload/waits/{part}_share" for part in ("activations", "optimizer", "parameters")),
}
GROUPS = {"activations", "bandwidth", "endurance", "memory", "optimizer", "tier", "waits"}


def run_all(home):
    """What the scripts printed and moved; one process, as most of the time goes into imports."""
    shipped = yaml.safe_load((ROOT / "configs" / "accelerate" / "offload.yaml").read_text())
    # Tiny models have little that is worth to be moved.
    shipped["ssd_offload_config"]["activations"] |= {"min_size": "1KiB", "budget": "100%"}
    (home / "offload.yaml").write_text(yaml.safe_dump(shipped))
    runs = {}
    for name, change in CHANGES.items():
        launched = [], ["--report_to", "tensorboard", "wandb"] if name in REPORTING else []
        by_flag = ["fit"], [change.strip("`")]
        runs[str(SCRIPTS / name)] = launched if change == LAUNCHED else by_flag
    variables = {"TENSORBOARD_LOGGING_DIR": str(home / "board"), "PYTHONPATH": str(ROOT)}
    variables |= {"WANDB_MODE": "offline", "WANDB_DIR": str(home), "SSD_OFFLOAD_METRICS_EVERY": "3"}
    twice = [str(ROOT / "tests" / "integrations" / "twice.py"), "results.json", json.dumps(runs)]
    launcher = ["-m", "accelerate.commands.launch", "--config_file", "offload.yaml"]
    succeeded(python(*launcher, *twice, home=home, variables=variables, timeout=280))
    return json.loads((home / "results.json").read_text())


# One test for what one process did: pytest-xdist would run it again for others.
def test_numbers_are_identical_and_bytes_move_as_the_document_says(tmp_path):
    for package in ("datasets", "jsonargparse", "peft", "tensorboard", "trl", "wandb"):
        pytest.importorskip(package)
    results = run_all(tmp_path)
    for script in CHANGES:
        plain, offloaded = results[script]["plain"], results[script]["offloaded"]
        assert len(plain["losses"]) >= 8
        assert len(plain["weights"]) == 1
        for key in ("losses", "weights"):
            assert offloaded[key] == plain[key], script
        assert plain["engines"] == 0
        assert not offloaded["prints metrics"]
        assert min(offloaded["moved"].values()) > 0, script
    written = table(results)
    if target := os.environ.get("SSD_OFFLOAD_SCRIPTS_TABLE"):
        Path(target).write_text(written)
    lines = DOCUMENT.read_text().splitlines()
    for line in written.splitlines():
        # Moved bytes depend on how far the disk keeps up; all else is as in the document.
        beginning = "|".join(line.split("|")[:4])
        assert any(other.startswith(beginning) for other in lines), beginning
    check_reports(tmp_path, results)


def check_reports(home, results):
    """Loggers have the metrics at the steps of the losses, of each of the scripts."""
    scalars = tensorboard_scalars(home / "board")
    assert [step for step, _ in scalars["train/loss"]] == len(REPORTING) * [*range(1, 9)]
    ours = {name for name in scalars if "offload/" in name}
    assert ours >= RATES
    assert {name.split("/")[1] for name in ours} >= GROUPS
    for name in ours:
        assert name.startswith("offload/")
        assert [step for step, _ in scalars[name]] == len(REPORTING) * [1, 4, 7, 8], name
        assert all(math.isfinite(value) for _, value in scalars[name])
    assert scalars[WRITTEN][0][1] < scalars[WRITTEN][3][1]

    assert len([*home.glob("wandb/offline-run-*/run-*.wandb")]) == len(REPORTING)
    for script in REPORTING:
        rows = [row for row in results[script]["offloaded"]["rows"] if WRITTEN in row]
        assert [row["train/global_step"] for row in rows] == [1, 4, 7, 8]
        assert all("train/loss" in row for row in rows[:-1])
        assert {name for name in rows[0] if "offload/" in name} == ours


def test_the_scripts_mention_nothing_of_ours():
    for script in CHANGES:
        lines = (SCRIPTS / script).read_text().splitlines()
        imports = [line for line in lines if line.lstrip().startswith(("import ", "from "))]
        assert imports
        assert "offload" not in "".join(imports)


def table(results):
    lines = ["| script | change | losses | activations moved | states moved |", "|---" * 5 + "|"]
    for script, change in CHANGES.items():
        offloaded, plain = results[script]["offloaded"], results[script]["plain"]
        same = offloaded["losses"] == plain["losses"] and offloaded["weights"] == plain["weights"]
        verdict = f"{len(plain['losses'])}, identical" if same else "differ"
        moved = (f"{bytes_ / 1024:,.0f} KiB" for bytes_ in offloaded["moved"].values())
        link = f"[`{script}`](../examples/unmodified/{script})"
        lines.append(f"| {' | '.join([link, change, verdict, *moved])} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- the launch file

SECTION = {"activations": {"min_size": "1KiB"}}
# What a script is given, without the seconds that importing torch takes.
GIVEN = """
import json, os, sys
names = ("ACCELERATE_USE_SSD_OFFLOAD", "SSD_OFFLOAD_CONFIG")
print(json.dumps([sys.argv[1:], [os.environ.get(name) for name in names]]))
"""


def launch_file(home, name, **more):
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    content |= {"num_processes": 1, "num_machines": 1, **more}
    (home / name).write_text(yaml.safe_dump(content))
    return home / name


def launch(monkeypatch, *arguments):
    """The console script `accelerate launch`, in this process; the script has one of its own."""
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", *arguments])
    main()


@pytest.mark.parametrize(
    "options",
    [
        "--config_file plain.yaml",
        "--config_file offload.yaml",
        "--config offload.yaml",
        "--num_processes 1 --config=presets/by_path.yaml",
    ],
)
def test_the_section_reaches_the_script_which_keeps_its_arguments(
    home, monkeypatch, capfd, options
):
    active = "plain" not in options
    (home / "given.py").write_text(GIVEN)
    (home / "presets").mkdir()
    launch_file(home, "plain.yaml")
    launch_file(home, "offload.yaml", ssd_offload_config=SECTION)
    (home / "presets" / "own.yaml").write_text(yaml.safe_dump(SECTION))
    launch_file(home / "presets", "by_path.yaml", ssd_offload_config="own.yaml")
    outer = {"optimizer": {"enabled": False}}
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", json.dumps(outer))
    own = ["--config", "of the script", "--config_file=its"]
    launch(monkeypatch, *options.split(), "given.py", *own)
    arguments, (switch, config) = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert arguments == own
    assert switch == ("true" if active else None)
    assert json.loads(config) == (SECTION if active else outer)


@pytest.mark.parametrize(
    ("section", "more", "message"),
    [
        ({"optimzer": {}}, {}, "did you mean 'optimizer'?"),
        ("no-such-preset", {}, "'no-such-preset' is neither a file that exists nor a preset"),
        (SECTION, {"distributed_type": "MEGATRON_LM"}, "distributed_type is MEGATRON_LM"),
    ],
    ids=["typo", "preset", "megatron"],
)
def test_a_wrong_section_is_refused_before_the_script(home, monkeypatch, section, more, message):
    launch_file(home, "offload.yaml", ssd_offload_config=section, **more)
    (home / "train.py").write_text("open('started', 'w').close()")
    with pytest.raises(SystemExit) as ended:
        launch(monkeypatch, "--config", "offload.yaml", "train.py")
    assert not (home / "started").exists()
    # Python prints it, and exits with status 1.
    for part in ("accelerate launch:", message, "offload.yaml", "ssd_offload_config"):
        assert part in str(ended.value.code)


def test_the_section_survives_a_rewrite_of_the_launch_file(tmp_path):
    for name, more in (("offload", {"ssd_offload_config": SECTION}), ("plain", {})):
        path = launch_file(tmp_path, f"{name}.yaml", **more)
        load_config_from_file(str(path)).to_yaml_file(str(path))
        rewritten = yaml.safe_load(path.read_text())
        assert rewritten.get("ssd_offload_config", "none") == more.get("ssd_offload_config", "none")
    typo = launch_file(tmp_path, "typo.yaml", ssd_ofload_config=SECTION)
    with pytest.raises(ValueError, match="ssd_ofload_config"):
        load_config_from_file(str(typo))


@pytest.mark.parametrize("distributed", ["NO", "DEEPSPEED", "MULTI_CPU", "FSDP"])
@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps])
def test_launch_files_are_yaml_or_json_and_may_name_several_processes(
    tmp_path, monkeypatch, distributed, write
):
    path = tmp_path / f"offload.{'json' if write is json.dumps else 'yaml'}"
    path.write_text(write({"distributed_type": distributed, "ssd_offload_config": SECTION}))
    assert load_config_from_file(str(path)).ssd_offload_config == SECTION
    variables = environment_for(str(path))
    assert json.loads(variables["SSD_OFFLOAD_CONFIG"]) == SECTION
    assert variables["ACCELERATE_USE_SSD_OFFLOAD"] == "true"
    # An empty section means the defaults, and none no offload.
    path = launch_file(tmp_path, "offload.yaml", ssd_offload_config=None)
    assert environment_for(str(path))["SSD_OFFLOAD_CONFIG"] == "{}"
    for plain in (None, str(launch_file(tmp_path, "plain.yaml"))):
        assert environment_for(plain) == {}
    monkeypatch.setenv("SSD_OFFLOAD_DISABLE", "1")
    assert environment_for(str(path)) == {}


def test_each_rank_puts_its_number_into_the_paths(home, monkeypatch):
    own = {"name": "own", "kind": "ssd", "path": "/dev/nvme${LOCAL_RANK}n1"}
    both = {"name": "both", "kind": "ssd", "path": ["$ROOM/$RANK", "$ROOM/$LOCAL_RANK"]}
    section = {"tiers": [own, both]}
    paths = {
        kind: str(launch_file(home, kind, distributed_type=kind, ssd_offload_config=section))
        for kind in ("NO", "MULTI_GPU")
    }
    monkeypatch.setenv("ROOM", str(home))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK\}?, which is not set"):
        environment_for(paths["NO"])
    given = environment_for(paths["MULTI_GPU"])["SSD_OFFLOAD_CONFIG"]
    monkeypatch.delenv("ROOM")  # the launcher's, and expanded there
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    expected = [[Path("/dev/nvme1n1")], [home / "5", home / "1"]]
    assert [tier.paths for tier in OffloadConfig.load(given).tiers] == expected
