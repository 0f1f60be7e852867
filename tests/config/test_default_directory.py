"""Directories that the engine refuses, or warns of, before anything is there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW

from offload_strategy import ConfigError, OffloadEngine
from tests.engine.test_engine import model, train
from tests.training import settings

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- places
def tier(path: Path | str, **options: Any) -> dict[str, Any]:
    return {"tiers": [{"name": "nvme", "kind": "ssd", "path": str(path), **options}]}


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nvme'.*there is no directory.*mkdir -p"):
        OffloadEngine(tier(tmp_path / "gone"))


def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"'nvme'.*file' is not a directory"):
        OffloadEngine(tier(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


NOT_WRITABLE = """
import os, sys
from offload_strategy import ConfigError, OffloadEngine
import offload_strategy.io.backends.posix
if os.getuid() == 0:  # who may write everywhere
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    OffloadEngine({"tiers": [{"name": "nvme", "kind": "ssd", "path": sys.argv[1]}]})
except ConfigError as error:
    print(error)
    sys.exit(3)
"""


def refused_for_another_user(place: Path) -> str:
    """What an ordinary user is told about a directory."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_WRITABLE, str(place)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "'nvme'" in done.stdout
    assert str(place) in done.stdout
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
@pytest.mark.parametrize("mode", [0o500, 0o600])
def test_a_directory_that_is_not_writable_is_refused(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "place"
        place.mkdir(mode=mode)
        Path(folder).chmod(0o755)
        if os.getuid() == 0:
            os.chown(place, 65534, 65534)
        assert "not writable for this user" in refused_for_another_user(place)
        place.chmod(0o700)
        assert list(place.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_a_directory_that_cannot_be_reached_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "place").mkdir(mode=0o777)
        Path(folder).chmod(0o700 if os.getuid() == 0 else 0o000)
        try:
            told = refused_for_another_user(Path(folder) / "place")
        finally:
            Path(folder).chmod(0o700)
        assert "cannot be reached: Permission denied" in told


def test_more_capacity_than_the_disk_has_is_refused(disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity is 100000 TiB, but .* has only .* available"):
        OffloadEngine(tier(disk, capacity="100000TiB"))


@pytest.mark.parametrize("capacity", [0, "0", -1, "-1GiB"])
def test_no_capacity_at_all_is_refused(disk: Path, capacity: Any) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].capacity"):
        OffloadEngine(tier(disk, capacity=capacity))


def test_a_tier_in_memory_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    place = Path("/dev/shm") / f"offload-strategy-{os.getpid()}"
    if not place.parent.is_dir():
        pytest.skip("this system has no /dev/shm")
    place.mkdir()
    try:
        with caplog.at_level(logging.WARNING, "offload_strategy"):
            OffloadEngine(tier(place, capacity="1MiB")).close()
        warned = [text for text in caplog.messages if "main memory" in text]
        assert len(warned) == 1
        assert str(place) in warned[0]
    finally:
        place.rmdir()


def test_nothing_stays_open_when_the_second_of_two_tiers_is_refused(
    disk: Path, tmp_path: Path
) -> None:
    tiers = tier(disk, capacity="1MiB")["tiers"] + [
        {"name": "other", "kind": "ssd", "path": str(tmp_path / "gone")}
    ]
    with pytest.raises(ConfigError, match="'other'"):
        OffloadEngine({"tiers": tiers})


def test_a_tier_that_nobody_uses_is_not_opened(disk: Path, tmp_path: Path) -> None:
    tiers = tier(disk, capacity="1MiB")["tiers"] + [
        {"name": "other", "kind": "ssd", "path": str(tmp_path / "gone")}
    ]
    only = {"tiers": ["nvme"]}
    OffloadEngine({"tiers": tiers, "activations": only, "optimizer": only}).close()


def test_a_forked_processes_engine_and_ours_share_nothing_on_disk(disk: Path) -> None:
    with OffloadEngine(settings(disk)), OffloadEngine(settings(disk)) as other:
        net = model()
        optimizer = other.attach(net, AdamW(net.parameters()))
        train(other, net, optimizer)
