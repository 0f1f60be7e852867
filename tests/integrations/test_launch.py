"""`accelerate launch` with a section in the launch file, and a script that knows nothing of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config.config_args import load_config_from_file

from offload_strategy import ConfigError, OffloadConfig
from offload_strategy.integrations.accelerate.launch import environment_for
from tests.integrations.support import OURS

SECTION = {"activations": {"min_size": "1KiB"}}

# What a script is given, without the seconds that importing torch takes.
GIVEN = """
import json, os, sys
names = ("ACCELERATE_USE_SSD_OFFLOAD", "SSD_OFFLOAD_CONFIG")
print(json.dumps([sys.argv[1:], [os.environ.get(name) for name in names]]))
"""


def launch_file(home: Path, name: str, **more: Any) -> Path:
    content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True}
    path = home / name
    path.write_text(yaml.safe_dump({**content, "num_processes": 1, "num_machines": 1, **more}))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of launches, with a clean environment."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """The console script `accelerate launch`, in this process; the script has one of its own."""
    monkeypatch.setattr(sys, "argv", ["accelerate", "launch", *arguments])
    main()


@pytest.mark.parametrize(
    ("options", "active"),
    [
        (["--config_file", "plain.yaml"], False),
        (["--config_file", "offload.yaml"], True),
        (["--config", "offload.yaml"], True),
        (["--num_processes", "1", "--config=presets/by_path.yaml"], True),
    ],
    ids=["plain", "config_file", "config", "config="],
)
def test_the_section_reaches_the_script_and_its_arguments_are_its_own(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    active: bool,
) -> None:
    (home / "given.py").write_text(GIVEN)
    (home / "presets").mkdir()
    launch_file(home, "plain.yaml")
    launch_file(home, "offload.yaml", ssd_offload_config=SECTION)
    (home / "presets" / "own.yaml").write_text(yaml.safe_dump(SECTION))
    launch_file(home / "presets", "by_path.yaml", ssd_offload_config="own.yaml")
    outer = '{"optimizer": {"enabled": false}}'
    monkeypatch.setenv("SSD_OFFLOAD_CONFIG", outer)
    own = ["--config", "of the script", "--config_file=its"]
    launch(monkeypatch, *options, "given.py", *own)
    arguments, (switch, config) = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert arguments == own
    assert switch == ("true" if active else None)
    assert json.loads(config) == (SECTION if active else json.loads(outer))


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
    home: Path, monkeypatch: pytest.MonkeyPatch, section: Any, more: dict[str, Any], message: str
) -> None:
    launch_file(home, "offload.yaml", ssd_offload_config=section, **more)
    (home / "train.py").write_text("open('started', 'w').close()")
    with pytest.raises(SystemExit) as ended:
        launch(monkeypatch, "--config", "offload.yaml", "train.py")
    assert not (home / "started").exists()
    # Python prints it, and exits with status 1.
    for part in ("accelerate launch:", message, "offload.yaml", "ssd_offload_config"):
        assert part in str(ended.value.code)


# ---------------------------------------------------------------------- without processes


def test_the_section_survives_a_rewrite_of_the_launch_file(tmp_path: Path) -> None:
    path = launch_file(tmp_path, "offload.yaml", ssd_offload_config=SECTION)
    load_config_from_file(str(path)).to_yaml_file(str(path))
    assert yaml.safe_load(path.read_text())["ssd_offload_config"] == SECTION
    plain = launch_file(tmp_path, "plain.yaml")
    load_config_from_file(str(plain)).to_yaml_file(str(plain))
    assert "ssd_offload_config" not in yaml.safe_load(plain.read_text())
    typo = launch_file(tmp_path, "typo.yaml", ssd_ofload_config=SECTION)
    with pytest.raises(ValueError, match="ssd_ofload_config"):
        load_config_from_file(str(typo))


@pytest.mark.parametrize("distributed", ["NO", "DEEPSPEED", "MULTI_CPU", "FSDP"])
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_launch_files_are_yaml_or_json_and_may_name_several_processes(
    tmp_path: Path, distributed: str, suffix: str
) -> None:
    path = tmp_path / f"offload.{suffix}"
    write: Any = json.dumps if suffix == "json" else yaml.safe_dump
    path.write_text(write({"distributed_type": distributed, "ssd_offload_config": SECTION}))
    assert load_config_from_file(str(path)).ssd_offload_config == SECTION
    variables = environment_for(str(path))
    assert json.loads(variables["SSD_OFFLOAD_CONFIG"]) == SECTION
    assert variables["ACCELERATE_USE_SSD_OFFLOAD"] == "true"


def test_an_empty_section_means_the_defaults(tmp_path: Path) -> None:
    path = launch_file(tmp_path, "offload.yaml", ssd_offload_config=None)
    assert environment_for(str(path))["SSD_OFFLOAD_CONFIG"] == "{}"
    assert environment_for(str(launch_file(tmp_path, "plain.yaml"))) == {}
    assert environment_for(None) == {}


def test_launched_processes_get_the_settings_of_an_allocator_that_leaves_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(launch_file(tmp_path, "offload.yaml", ssd_offload_config=SECTION, use_cpu=True))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for version, given in (("glibc 2.36", True), ("glibc 2.39", False), ("musl 1.2", False)):
        monkeypatch.setattr("os.confstr", lambda _, version=version: version)
        assert ("GLIBC_TUNABLES" in environment_for(path)) is given
    monkeypatch.setattr("os.confstr", lambda _: "glibc 2.36")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert "GLIBC_TUNABLES" not in environment_for(path), "the user's own come first"


def test_each_rank_puts_its_own_number_into_the_paths(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [
        {"name": "own", "kind": "ssd", "path": "/dev/nvme${LOCAL_RANK}n1"},
        {"name": "both", "kind": "ssd", "path": ["$ROOM/$RANK", "$ROOM/$LOCAL_RANK"]},
    ]

    def environment(distributed: str) -> dict[str, str]:
        more = {"distributed_type": distributed, "ssd_offload_config": {"tiers": tiers}}
        return environment_for(str(launch_file(home, "ranks.yaml", **more)))

    monkeypatch.setenv("ROOM", str(home))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK\}?, which is not set"):
        environment("NO")
    section = environment("MULTI_GPU")["SSD_OFFLOAD_CONFIG"]
    monkeypatch.delenv("ROOM")  # the launcher's, and expanded there
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    own, both = OffloadConfig.load(section).tiers
    assert own.paths == [Path("/dev/nvme1n1")]
    assert both.paths == [home / "5", home / "1"]
