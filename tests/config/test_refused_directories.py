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


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nvme'.*there is no directory.*mkdir -p"):
        OffloadEngine(tier(tmp_path / "gone"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"'nvme'.*file' is not a directory"):
        OffloadEngine(tier(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


AS_ANOTHER_USER = """
import os, sys
from offload_strategy import ConfigError, OffloadEngine
import offload_strategy.io.backends.posix
if os.getuid() == 0:  # who may write everywhere
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    try:
        OffloadEngine({"tiers": [{"name": "nvme", "kind": "ssd", "path": path}]})
    except ConfigError as error:
        print(str(error).replace("\\n", " "))
"""


def test_a_directory_that_is_not_writable_or_cannot_be_reached_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / name for name in ("500", "600", "hidden/place")]
        places[2].mkdir(parents=True, mode=0o777)
        for place in places[:2]:
            place.mkdir(mode=int(place.name, 8))
            if os.getuid() == 0:
                os.chown(place, 65534, 65534)
        places[2].parent.chmod(0o700 if os.getuid() == 0 else 0o000)
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, *map(str, places)],
            capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        for place in (*places[:2], places[2].parent):
            place.chmod(0o700)
        assert done.returncode == 0, done.stderr
        told = done.stdout.splitlines()
        assert all(
            "'nvme'" in text and str(p) in text for p, text in zip(places, told, strict=True)
        )
        assert all("not writable for this user" in text for text in told[:2])
        assert "cannot be reached: Permission denied" in told[2]
        assert [list(place.iterdir()) for place in places] == [[], [], []]


def test_more_capacity_than_the_disk_has_is_refused(disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity is 100000 TiB, but .* has only .* available"):
        OffloadEngine(tier(disk, capacity="100000TiB"))


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


def test_tiers_that_are_used_are_opened_together_or_not_at_all(disk: Path, tmp_path: Path) -> None:
    gone = {"name": "other", "kind": "ssd", "path": str(tmp_path / "gone")}
    tiers = [*tier(disk, capacity="1MiB")["tiers"], gone]
    with pytest.raises(ConfigError, match="'other'"):
        OffloadEngine({"tiers": tiers})
    only = {"tiers": ["nvme"]}
    OffloadEngine({"tiers": tiers, "activations": only, "optimizer": only}).close()


def test_a_forked_processes_engine_and_ours_share_nothing_on_disk(disk: Path) -> None:
    with OffloadEngine(settings(disk)), OffloadEngine(settings(disk)) as other:
        net = model()
        optimizer = other.attach(net, AdamW(net.parameters()))
        train(other, net, optimizer)
