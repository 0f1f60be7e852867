"""Where directories of tiers lie, what their file systems are, and which ones are refused."""

import os
import tempfile
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.config import (
    OffloadConfig,
    TierConfig,
    default_directory,
    directories,
)
from offload_strategy.config.directories import FileSystem, file_system_of, is_rotational
from tests.io.loop_devices import loop_disk
from tests.module_map import ROOT
from tests.support import run_python


def test_a_path_is_expanded_and_absolute(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")

    def path(text):
        return TierConfig(name="a", kind="ssd", path=Path(text)).path

    assert path("$SCRATCH/offload") == Path("/scratch/me/offload")
    assert path("~/offload") == Path("/home/me/offload")
    planning = {"device_memory": "1GiB", "plan": "$SCRATCH/plan.json"}
    config = OffloadConfig(report="~/run.json", planning=planning, activations={"enabled": True})
    assert config.report == Path("/home/me/run.json")
    assert config.planning.plan == Path("/scratch/me/plan.json")
    assert path("offload") == Path.cwd() / "offload"
    monkeypatch.setenv("SCRATCH", "/scratch/$weird")
    assert path("${SCRATCH}/offload") == Path("/scratch/$weird/offload")
    for text in ("$SCRATCH/$NOWHERE", "$SCRATCH/${NOWHERE}", "${}/offload"):
        with pytest.raises(ValueError, match=r"(NOWHERE|{})}?, which is not set"):
            path(text)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_the_default_directory_is_never_in_memory(kind, tmp_path, monkeypatch):
    there = tmp_path / "not" / "there"
    monkeypatch.setattr("tempfile.tempdir", str(there))
    monkeypatch.setattr(directories, "file_system_of", lambda path: FileSystem(kind))
    assert default_directory() == (Path("/var/tmp") if kind == "tmpfs" else there)
    monkeypatch.setenv("SSD_OFFLOAD_DIR", str(tmp_path))
    assert OffloadConfig().tiers == [TierConfig(name="ssd", kind="ssd", path=tmp_path)]


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
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        try:
            said = run_python("-c", AS_ANOTHER_USER, *places, timeout=280, env=environment)
        finally:
            for place in (*places[:2], places[2].parent):
                place.chmod(0o700)
        reasons = 2 * ["not writable for this user"] + ["cannot be reached: Permission denied"]
        for place, told, reason in zip(places, said.splitlines(), reasons, strict=True):
            assert all(words in told for words in ("'nvme'", str(place), reason))
            assert list(place.iterdir()) == []


def test_tiers_that_are_used_are_opened_together_or_not_at_all(disk, tmp_path):
    own = {"name": "a", "kind": "ssd", "path": str(disk), "capacity": "1MiB"}
    sections = {"tiers": [own, {"name": "other", "kind": "ssd", "path": str(tmp_path / "gone")}]}
    with pytest.raises(ConfigError, match="'other'"):
        OffloadEngine(sections)
    only = {"tiers": ["a"]}
    OffloadEngine({**sections, "activations": only, "optimizer": only}).close()


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
    assert file_system_of(path) == FileSystem("unknown")


def test_a_real_mount_is_found_through_a_link_and_for_what_is_yet_to_be_made(tmp_path):
    with loop_disk(tmp_path, 16 << 20) as disk:
        link = tmp_path / "link"
        link.symlink_to(disk.directory)
        assert file_system_of(link / "not" / "there") == FileSystem("ext4", rotational=None)
    if ("/dev/shm", "tmpfs") in {m[1:3] for m in psutil.disk_partitions(all=True)}:
        assert file_system_of("/dev/shm/not/yet/there").is_memory


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
