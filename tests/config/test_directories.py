"""Directories: which are refused before anything is there, and what their file systems are."""

import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.config import is_memory_filesystem
from offload_strategy.config.directories import FileSystem, file_system_of, is_rotational
from tests.io.loop_devices import loop_disk

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- places
def tier(path: Path | str, **options):
    return {"tiers": [{"name": "nvme", "kind": "ssd", "path": str(path), **options}]}


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


def test_a_directory_that_is_not_writable_or_cannot_be_reached_is_refused():
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


def test_tiers_that_are_used_are_opened_together_or_not_at_all(disk, tmp_path):
    gone = {"name": "other", "kind": "ssd", "path": str(tmp_path / "gone")}
    tiers = [*tier(disk, capacity="1MiB")["tiers"], gone]
    with pytest.raises(ConfigError, match="'other'"):
        OffloadEngine({"tiers": tiers})
    only = {"tiers": ["nvme"]}
    OffloadEngine({"tiers": tiers, "activations": only, "optimizer": only}).close()


# ---------------------------------------------------------------------- file systems
Mount = namedtuple("Mount", "mountpoint fstype")
MOUNTS = {
    "/proc": "proc", "/": "ext4", "/mnt/data": "xfs", "/mnt/data/share": "nfs4", "/mnt/two": "tmpfs"
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "ext4"),
        ("/mnt/data", "xfs"),
        ("/mnt/database", "ext4"),
        ("/mnt/data/share/me", "nfs4"),
        ("/mnt/two", "btrfs"),
    ],
)
def test_the_mount_is_the_innermost_and_latest(path, kind, monkeypatch):
    mounts = [*map(Mount._make, MOUNTS.items()), Mount("/mnt/two", "btrfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    found = file_system_of(path)
    assert (found.kind, found.is_network) == (kind, kind == "nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert file_system_of(path) is None


def test_a_real_mount_is_found_through_a_link_and_for_what_is_yet_to_be_made(tmp_path):
    with loop_disk(tmp_path, 16 << 20) as disk:
        link = tmp_path / "link"
        link.symlink_to(disk.directory)
        assert file_system_of(link / "not" / "there") == FileSystem("ext4", rotational=None)
    if ("/dev/shm", "tmpfs") in {m[1:3] for m in psutil.disk_partitions(all=True)}:
        assert is_memory_filesystem("/dev/shm/not/yet/there")


@pytest.mark.parametrize(
    ("name", "partition", "answer", "expected"),
    [
        ("sda", "sda1", "1", True),
        ("nvme0n1", "", "0", False),
        ("vda", "", "1", None),  # virtual disks do not tell
        ("sda", "", None, None),
    ],
)
def test_a_partition_is_as_its_disk(name, partition, answer, expected, tmp_path, monkeypatch):
    disk = tmp_path / "devices" / name
    (disk / partition).mkdir(parents=True)
    (disk / "queue").mkdir()
    if answer is not None:
        (disk / "queue" / "rotational").write_text(answer + "\n")
    number = os.stat(tmp_path).st_dev
    (tmp_path / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk / partition)
    assert is_rotational(tmp_path, tmp_path) is expected
    monkeypatch.delattr(os, "major")
    assert is_rotational(tmp_path, tmp_path) is None, "this system does not tell"
