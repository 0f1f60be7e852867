from __future__ import annotations

from pathlib import Path

import pytest

from offload_strategy.config.file_systems import (
    FileSystem,
    file_system_of,
    find_mount,
    is_rotational,
)
from tests.io.loop_devices import loop_disk

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 8:1 / /mnt/data rw - xfs /dev/sda1 rw
32 27 0:44 / /mnt/data/share rw shared:4 master:2 - nfs4 server:/export rw
33 27 0:45 / /mnt/with\040space rw - tmpfs none rw
34 27 0:46 / /mnt/twice rw - tmpfs none rw
35 27 259:1 / /mnt/twice rw - btrfs /dev/nvme0n1 rw
a line that is no mount
"""


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/", "ext4", "/"),
        ("/home/me", "ext4", "/"),
        ("/mnt/data", "xfs", "/mnt/data"),
        ("/mnt/database", "ext4", "/"),
        ("/mnt/data/share/me", "nfs4", "/mnt/data/share"),
        ("/mnt/with space/x", "tmpfs", "/mnt/with space"),
        ("/mnt/twice", "btrfs", "/mnt/twice"),
    ],
)
def test_the_mount_is_the_innermost_and_latest(path: str, kind: str, point: str) -> None:
    found = find_mount(path, TABLE, lambda number: None)
    assert found == FileSystem(kind, point)


def test_the_disk_is_asked_by_its_number() -> None:
    found = find_mount("/mnt/data", TABLE, {"8:1": True}.get)
    assert found is not None
    assert found.rotational is True
    assert find_mount("/mnt", "", lambda number: None) is None


def test_network_file_systems_are_known() -> None:
    assert FileSystem("lustre", "/").is_network
    assert not FileSystem("xfs", "/").is_network


def test_a_real_mount_is_found_through_a_symbolic_link(tmp_path: Path) -> None:
    with loop_disk(tmp_path, 16 << 20) as disk:
        link = tmp_path / "link"
        link.symlink_to(disk.directory)
        found = file_system_of(link)
        assert found == FileSystem("ext4", str(disk.directory), rotational=None)


def test_a_partition_is_as_its_disk_and_virtual_disks_do_not_tell(tmp_path: Path) -> None:
    disks, numbers = tmp_path / "devices", tmp_path / "block"
    numbers.mkdir()
    for number, name, answer in (
        ("8:0", "sda", "1"),
        ("259:0", "nvme0n1", "0"),
        ("254:0", "vda", "1"),
    ):
        (disks / name / "queue").mkdir(parents=True)
        (disks / name / "queue" / "rotational").write_text(answer + "\n")
        (numbers / number).symlink_to(disks / name)
    (disks / "sda" / "sda1").mkdir()
    (numbers / "8:1").symlink_to(disks / "sda" / "sda1")
    answers = {
        number: is_rotational(number, numbers) for number in ("8:0", "8:1", "259:0", "254:0", "0:9")
    }
    assert answers == {"8:0": True, "8:1": True, "259:0": False, "254:0": None, "0:9": None}
