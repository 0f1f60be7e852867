from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from offload_strategy.errors import ConfigError, StorageError
from offload_strategy.io.regions import region as region_module
from offload_strategy.io.regions.directory_check import check_directory
from offload_strategy.io.regions.region import Region
from offload_strategy.units import GiB, MiB, format_size

UNNAMED = [
    pytest.param(True, id="unnamed", marks=pytest.mark.skipif(
        not hasattr(os, "O_TMPFILE"), reason="this system has no unnamed files")),
    pytest.param(False, id="unlinked"),
]  # fmt: skip


@pytest.fixture(params=UNNAMED)
def region(request, disk, monkeypatch):
    """A region in a file that was created unnamed, and one in a file that was unlinked."""
    if not request.param:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    before = os.umask(0)  # files are private all the same
    made = Region(disk, "nvme", capacity=64 * MiB)
    os.umask(before)
    yield made
    made.close()


def test_the_file_has_no_name_and_only_its_owner_may_read_it(region, disk):
    status = os.fstat(region.fd)
    assert list(disk.iterdir()) == []
    assert status.st_nlink == 0
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(region.fd)


def test_blocks_are_there_before_they_are_written(region):
    assert os.fstat(region.fd).st_blocks == 0
    extent = region.allocate(10 * MiB)
    assert extent is not None
    status = os.fstat(region.fd)
    assert status.st_size == 64 * MiB  # in one step: less than what a step grows by
    assert status.st_blocks * 512 >= 10 * MiB


def test_the_file_grows_in_large_steps(disk, monkeypatch):
    monkeypatch.setattr(region_module, "GROWTH_BYTES", 8 * MiB)
    region = Region(disk, "nvme", capacity=30 * MiB)
    sizes = []
    for _ in range(30):
        assert region.allocate(1 * MiB) is not None
        sizes.append(os.fstat(region.fd).st_size // MiB)
    assert sizes == [8] * 8 + [16] * 8 + [24] * 8 + [30] * 6
    region.close()


def test_no_capacity_means_what_the_disk_has_less_a_reserve(disk):
    free = shutil.disk_usage(disk).free
    region = Region(disk, "nvme")
    # Others write to the disk as well.
    assert abs(region.capacity - (free - region_module.RESERVE_BYTES)) < 1 * GiB
    region.close()


def test_what_other_programs_used_meanwhile_is_not_allocated(region, monkeypatch):
    real = os.fstatvfs(region.fd)
    left = region_module.RESERVE_BYTES + 3 * MiB

    class Full:
        f_frsize = real.f_frsize
        f_bavail = left // real.f_frsize

    monkeypatch.setattr(os, "fstatvfs", lambda fd: Full)
    assert region.allocate(4 * MiB) is None
    assert region.used_bytes == 0
    assert region.allocate(2 * MiB) is not None
    assert os.fstat(region.fd).st_size <= 3 * MiB


def fail_to_preallocate(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)


def test_a_disk_that_fills_up_while_the_file_grows_is_a_full_tier_and_others_are_errors(
    region, monkeypatch
):
    fail_to_preallocate(monkeypatch, errno.ENOSPC)
    assert region.allocate(1 * MiB) is None
    fail_to_preallocate(monkeypatch, errno.EIO)
    with pytest.raises(StorageError, match=r"tier 'nvme'.*64 MiB.*Input/output error"):
        region.allocate(1 * MiB)
    assert region.used_bytes == 0
    monkeypatch.undo()
    assert region.allocate(64 * MiB) is not None


@pytest.mark.parametrize("answer", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, None])
def test_where_nothing_can_be_preallocated_the_file_is_sparse(region, monkeypatch, answer):
    if answer is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        fail_to_preallocate(monkeypatch, answer)
    assert region.allocate(1 * MiB) is not None
    assert os.fstat(region.fd).st_size == 64 * MiB


def test_a_capacity_beyond_the_disk_is_refused_with_both_figures(disk):
    capacity = shutil.disk_usage(disk).free + 1000 * GiB
    with pytest.raises(ConfigError, match=r"'nvme'.*Lower the capacity") as refused:
        Region(disk, "nvme", capacity=capacity)
    assert str(disk) in str(refused.value)
    assert format_size(capacity) in str(refused.value)


def test_a_disk_without_any_room_is_refused(disk, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 * MiB, 99 * MiB, 1 * MiB)
    )
    with pytest.raises(ConfigError, match=r"'nvme'.*too little free space \(1 MiB\)"):
        Region(disk, "nvme")


@pytest.mark.parametrize("direct", ["auto", False])
def test_direct_io_is_used_unless_it_is_not_wanted(disk, caplog, direct):
    region = Region(disk, "nvme", capacity=1 * MiB, direct=direct)
    if direct and not region.direct:
        pytest.skip("the temporary directory does not support direct I/O")
    assert (
        bool(fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_DIRECT) == region.direct == bool(direct)
    )
    assert caplog.messages == []
    region.close()


def refuse_direct(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    real_open, direct = os.open, os.O_DIRECT

    def open_(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args, **options)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if how == "by a short write":
            return 512
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if how == "at open":
        monkeypatch.setattr(os, "open", open_)
    elif how == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    else:
        monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize(
    "how", ["at open", "at the first write", "by a short write", "no such flag"]
)
def test_where_direct_io_is_refused_auto_warns_once_and_true_is_an_error(
    disk, monkeypatch, caplog, how
):
    refuse_direct(monkeypatch, how)
    with caplog.at_level(logging.WARNING, "offload_strategy"):
        region = Region(disk, "nvme", capacity=1 * MiB, direct="auto")
    assert not region.direct
    assert [message for message in caplog.messages if "direct I/O" in message and "nvme" in message]
    assert len(caplog.messages) == 1
    region.close()
    with pytest.raises(ConfigError, match=r"refuses direct I/O \(io.direct: true\)"):
        Region(disk, "nvme", capacity=1 * MiB, direct=True)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_file_system_in_memory_gets_a_warning(caplog):
    level = caplog.at_level(logging.WARNING, "offload_strategy")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, level:
        Region(Path(place), "nvme", capacity=1 * MiB).close()
    assert any("main memory" in message and place in message for message in caplog.messages)


def test_a_closed_region_allocates_nothing_but_frees_extents(region):
    extent = region.allocate(1)
    assert extent is not None
    region.close()
    region.close()
    with pytest.raises(StorageError, match="closed"):
        region.allocate(1)
    region.free(extent)
    assert region.used_bytes == 0


def test_a_path_that_is_no_directory_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    expected = {
        "a/b": (str(tmp_path / "a" / "b"), repr(str(tmp_path)), "mkdir -p"),
        "file": ("is not a directory",),
        "link": ("there is no directory",),
    }
    for name, texts in expected.items():
        with pytest.raises(ConfigError) as refused:
            check_directory(tmp_path / name, "nvme")
        assert all(text in str(refused.value) for text in texts), name


def test_a_system_without_positioned_io_is_told_to_use_memory(disk, monkeypatch):
    monkeypatch.delattr(os, "pread")
    with pytest.raises(ConfigError, match="Use a tier of kind dram"):
        Region(disk, "nvme", capacity=1 * MiB)


# ---------------------------------------------------------------------- other users
STRANGER = 12345


@pytest.mark.parametrize(
    ("mode", "owner", "group", "risk"),
    [
        (0o1777, -1, -1, None),
        (0o775, -1, -1, None),  # of the user's own group
        (0o777, -1, -1, "is writable for everybody without the sticky bit"),
        (0o770, -1, STRANGER, rf"is writable for its group \({STRANGER}\) without the sticky bit"),
        (0o1770, -1, STRANGER, None),
        (0o700, STRANGER, -1, rf"belongs to another user \({STRANGER}\)"),
    ],
)
def test_a_directory_that_others_control_is_refused(disk, tmp_path, mode, owner, group, risk):
    if os.geteuid() != 0:
        pytest.skip("only root gives a directory away")
    disk.chmod(mode)
    os.chown(disk, owner, group)
    (link := tmp_path / "link").symlink_to(disk)
    if risk is not None:
        with pytest.raises(ConfigError, match=rf"tier 'nvme'.*{risk}.*mkdir -m 700 {disk}/offload"):
            check_directory(link, "nvme")
        return
    assert check_directory(link, "nvme") == disk
    os.lchown(link, STRANGER, -1)
    with pytest.raises(ConfigError, match=rf"symbolic link of another user \({STRANGER}\)"):
        check_directory(link, "nvme")
