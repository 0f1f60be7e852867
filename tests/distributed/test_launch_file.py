"""A launch file's paths may be those of one rank each."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from offload_strategy import ConfigError, OffloadConfig
from offload_strategy.integrations.accelerate.launch import environment_for


def _launch_file(folder: Path, distributed: str) -> str:
    tiers = [
        {"name": "own", "kind": "ssd", "path": "/dev/nvme${LOCAL_RANK}n1"},
        {"name": "both", "kind": "ssd", "path": ["$ROOM/$RANK", "$ROOM/$LOCAL_RANK"]},
    ]
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed,
        "ssd_offload_config": {"tiers": tiers},
    }
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_each_rank_puts_its_own_number_into_the_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOM", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    section = environment_for(_launch_file(tmp_path, "MULTI_GPU"))["SSD_OFFLOAD_CONFIG"]
    monkeypatch.delenv("ROOM")  # the launcher's, and expanded there
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    own, both = OffloadConfig.load(section).tiers
    assert own.paths == [Path("/dev/nvme1n1")]
    assert both.paths == [tmp_path / "5", tmp_path / "1"]


def test_one_process_has_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOM", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=r"LOCAL_RANK\}?, which is not set"):
        environment_for(_launch_file(tmp_path, "NO"))
