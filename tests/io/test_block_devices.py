"""Raw block devices as the path of a tier; no data is ever lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.regions.block_devices import _content
from offload_strategy.io.regions.region import Region
from offload_strategy.units import MiB
from tests.io.conformance import HostMemory, begin
from tests.io.loop_devices import loop_device, loop_disk, need, run

SIZE = 32 * MiB


@pytest.fixture
def file(tmp_path):
    return tmp_path / "device.img"


@pytest.fixture
def device(file):
    with loop_device(file, SIZE) as made:
        yield made


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        Region(path, "raw", **options)
    assert "'raw'" in str(refused.value)
    assert str(path) in str(refused.value)
    return str(refused.value)


def descriptors_of(device: Path) -> list[str]:
    """This process's open descriptors of a device."""
    entries = list(Path("/proc/self/fd").iterdir())
    return [entry.name for entry in entries if os.path.realpath(entry) == str(device)]


def put(device: Path, offset: int, data: bytes) -> None:
    with open(device, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def move(region: Region, offset: int, data: bytearray, *, write: bool) -> None:
    backend = create_backend("posix", threads=1, block_size=1 * MiB)
    memory = HostMemory(len(data))
    memory.data = bytes(data)
    assert begin(backend, region.fd, memory, write=write, offset=offset).get() is None
    backend.close()
    data[:] = memory.data


@pytest.mark.parametrize("label", [b"", b"label"], ids=["empty", "overwritten"])
def test_a_device_gives_all_but_its_first_megabyte_which_stays_as_it_was(device, file, label):
    put(device, 1000, label)
    region = Region(device, "raw", overwrite=bool(label))
    assert region.capacity == SIZE - 1 * MiB
    assert region.path == device
    assert region.direct
    extent = region.allocate(SIZE - 1 * MiB)
    assert extent is not None
    assert extent.offset == 1 * MiB
    assert region.allocate(1) is None
    written = bytearray(os.urandom(100_001))
    move(region, extent.offset, written, write=True)
    read = bytearray(len(written))
    move(region, extent.offset, read, write=False)
    assert read == written
    os.fsync(region.fd)
    with open(file, "rb") as under:
        assert under.read(1 * MiB) == (bytes(1000) + label).ljust(1 * MiB, b"\0")
        assert under.read(len(written)) == written
    region.free(extent)
    assert region.used_bytes == 0
    for _ in range(2):
        region.close()
    assert descriptors_of(device) == []


def test_the_used_part_is_discarded_and_the_device_is_accepted_again(device, file):
    for _ in range(2):
        region = Region(device, "raw")
        extents = [region.allocate(4 * MiB), region.allocate(4 * MiB)]
        for extent in extents:
            assert extent is not None
            move(region, extent.offset, bytearray(os.urandom(1 * MiB)), write=True)
        os.fsync(region.fd)
        assert os.stat(file).st_blocks * 512 >= 2 * MiB
        region.close()
        assert os.stat(file).st_blocks * 512 < 1 * MiB


def test_a_forked_child_that_closes_its_copy_discards_nothing(device):
    region = Region(device, "raw")
    extent = region.allocate(1 * MiB)
    assert extent is not None
    written = bytearray(os.urandom(1 * MiB))
    move(region, extent.offset, written, write=True)
    child = os.fork()
    if child == 0:
        region.close()
        os._exit(0)
    os.waitpid(child, 0)
    read = bytearray(len(written))
    move(region, extent.offset, read, write=False)
    assert read == written
    region.close()


def test_a_capacity_beyond_the_device_is_refused(device):
    assert "only 31 MiB available" in refusal(device, capacity=SIZE)
    assert descriptors_of(device) == []
    Region(device, "raw", capacity=SIZE - 1 * MiB).close()


def test_a_link_to_a_device_is_followed_to_it(device, tmp_path):
    link = tmp_path / "by-id"
    link.symlink_to(device)
    region = Region(link, "raw", direct=False)
    assert region.path == device
    assert not region.direct
    region.close()


def test_a_device_with_a_file_system_is_refused_unless_the_config_says_so(device, caplog):
    need("mkfs.ext4")
    run("mkfs.ext4", "-q", device)
    message = refusal(device)
    assert "ext4" in message
    assert "overwrite: true" in message
    assert descriptors_of(device) == []
    with caplog.at_level(logging.WARNING, "offload_strategy"):
        Region(device, "raw", overwrite=True).close()
    assert any("being overwritten" in text and "ext4" in text for text in caplog.messages)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mounted_device_is_refused_whatever_the_config_says(tmp_path, overwrite):
    with loop_disk(tmp_path, SIZE) as disk:
        message = refusal(disk.device, overwrite=overwrite)
    assert "in use" in message
    assert "mounted" in message


def test_a_second_user_of_a_device_is_refused_and_told_about_local_rank(device):
    region = Region(device, "raw")
    assert "$LOCAL_RANK" in refusal(device)
    region.close()
    Region(device, "raw").close()


@pytest.mark.parametrize(
    ("offset", "data"), [(0, b"\x01"), (1 * MiB - 1, b"\xff"), (300_000, b"notes")]
)
def test_a_device_with_bytes_of_an_unknown_kind_is_refused(device, offset, data):
    put(device, offset, data)
    assert "data of an unknown kind" in refusal(device)
    Region(device, "raw", overwrite=True).close()


def test_a_device_that_is_read_only_or_too_small_is_refused(file):
    file.write_bytes(bytes(SIZE))
    with loop_device(file, read_only=True) as device:
        message = refusal(device)
    assert "read-only" in message
    assert "--setrw" in message
    with loop_device(file, 1 * MiB) as device:
        assert "nothing is left" in refusal(device)


def test_a_device_that_cannot_be_read_is_refused(file):
    with loop_device(file, SIZE) as device:
        os.truncate(file, 0)
        message = refusal(device, overwrite=True)
    assert "cannot be read: Input/output error" in message


def test_a_user_who_may_not_open_it_is_told_the_group(device, monkeypatch):
    real = os.open

    def open_(path, flags, *args, **options):
        if str(path) == str(device):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    message = refusal(device)
    assert "Permission denied" in message
    assert f"usermod -aG {device.group()}" in message


def test_for_a_device_that_does_not_exist_mkdir_is_not_suggested():
    message = refusal(Path("/dev/no-such-device"))
    assert "there is no device" in message
    assert "mkdir" not in message


def test_overwrite_is_refused_for_a_directory(disk):
    assert "overwrite: true is for block devices" in refusal(disk, overwrite=True)


@pytest.mark.parametrize("program", ["mkfs.ext2", "mkswap", None], ids=["ext2", "swap", "gpt"])
def test_signatures_are_named(file, program):
    with open(file, "wb") as made:
        made.truncate(SIZE)
    assert _content(file, SIZE, "tier", overwrite=False) is None
    if program is None:  # the copy of a partition table at the end of a device
        put(file, SIZE - 512, b"EFI PART")
    elif shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    else:
        run(program, file)
    name = {"mkfs.ext2": "ext2", "mkswap": "swap", None: "gpt"}[program]
    assert _content(file, SIZE, "tier", overwrite=False) == f"signatures of {name}"


def test_without_wipefs_a_device_is_refused_unless_it_may_be_overwritten(device, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: "/nowhere/wipefs")
    assert "Install util-linux" in refusal(device)
    Region(device, "raw", overwrite=True).close()
