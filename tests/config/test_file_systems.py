"""The file system of a path, and whether its disk rotates."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from offload_strategy.config import is_memory_filesystem
from offload_strategy.config.directories import FileSystem, file_system_of, is_rotational
from tests.io.loop_devices import loop_disk

Mount = namedtuple("Mount", "mountpoint fstype")
MOUNTS = [
    Mount("/proc", "proc"),
    Mount("/", "ext4"),
    Mount("/mnt/data", "xfs"),
    Mount("/mnt/data/share", "nfs4"),
    Mount("/mnt/twice", "tmpfs"),
    Mount("/mnt/twice", "btrfs"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/mnt/data", "xfs"),
        ("/mnt/database", "ext4"),
        ("/mnt/data/share/me", "nfs4"),
        ("/mnt/twice", "btrfs"),
    ],
)
def test_the_mount_is_the_innermost_and_latest(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: MOUNTS)
    found = file_system_of(path)
    assert found is not None
    assert (found.kind, found.is_network) == (kind, kind == "nfs4")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])
    assert file_system_of(path) is None


def test_a_real_mount_is_found_through_a_symbolic_link(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 16 << 20) as disk:
        link = tmp_path / "link"
        link.symlink_to(disk.directory)
        assert file_system_of(link / "not" / "there") == FileSystem("ext4", rotational=None)


def test_memory_is_told_from_disk_also_for_paths_yet_to_be_made() -> None:
    if ("/dev/shm", "tmpfs") not in {m[1:3] for m in psutil.disk_partitions(all=True)}:
        pytest.skip("no tmpfs at /dev/shm")
    assert is_memory_filesystem("/dev/shm/not/yet/there")
    assert is_memory_filesystem("/proc") is False


@pytest.mark.parametrize(
    ("name", "partition", "answer", "expected"),
    [
        ("sda", "", "1", True),
        ("sda", "sda1", "1", True),
        ("nvme0n1", "", "0", False),
        ("vda", "", "1", None),  # virtual disks do not tell
        ("sda", "", None, None),
    ],
)
def test_a_partition_is_as_its_disk(
    name: str, partition: str, answer: str | None, expected: bool | None, tmp_path: Path
) -> None:
    disk = tmp_path / "devices" / name
    (disk / partition).mkdir(parents=True)
    (disk / "queue").mkdir()
    if answer is not None:
        (disk / "queue" / "rotational").write_text(answer + "\n")
    number = os.stat(tmp_path).st_dev
    (tmp_path / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk / partition)
    assert is_rotational(tmp_path, tmp_path) is expected
