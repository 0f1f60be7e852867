"""Raw block devices as the path of a tier; no data is ever lost."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.regions.region import Region
from offload_strategy.units import MiB
from tests.io.conformance import HostMemory, begin
from tests.io.loop_devices import loop_device, loop_disk, need, run
from tests.support import run_forked

SIZE = 32 * MiB


@pytest.fixture
def file(tmp_path):
    return tmp_path / "device.img"


@pytest.fixture
def device(file):
    with loop_device(file, SIZE) as made:
        yield made


def refusal(path, *words, **options):
    """Why a path is refused; nothing is left open."""
    with pytest.raises(ConfigError) as refused:
        Region(path, "raw", **options)
    message = str(refused.value)
    assert [part for part in ("'raw'", str(path), *words) if part not in message] == [], message
    assert not is_open(path)
    return message


def is_open(device):
    return str(device) in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def put(device, offset, data):
    with open(device, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)


def move(region, offset, data, *, write=False):
    """Write bytes, or read as many; returns what is in memory then."""
    backend = create_backend("posix", threads=1, block_size=1 * MiB)
    memory = HostMemory(len(data))
    memory.data = data if write else bytes(len(data))
    assert begin(backend, region.fd, memory, write=write, offset=offset).get() is None
    backend.close()
    return memory.data


@pytest.mark.parametrize("label", [b"", b"label"], ids=["empty", "overwritten"])
@pytest.mark.parametrize("direct", ["auto", False])
def test_a_device_gives_all_but_its_first_megabyte_which_stays_as_is(device, file, label, direct):
    put(device, 1000, label)
    link = file.with_name("by-id")
    link.symlink_to(device)
    region = Region(link, "raw", direct=direct, overwrite=bool(label))
    assert (region.capacity, region.path, region.direct) == (SIZE - 1 * MiB, device, bool(direct))
    extent = region.allocate(SIZE - 1 * MiB)
    assert extent.offset == 1 * MiB
    assert region.allocate(1) is None
    written = os.urandom(100_001)
    move(region, extent.offset, written, write=True)
    assert move(region, extent.offset, written) == written
    os.fsync(region.fd)
    with open(file, "rb") as under:
        assert under.read(1 * MiB) == (bytes(1000) + label).ljust(1 * MiB, b"\0")
        assert under.read(len(written)) == written
    region.free(extent)
    assert region.used_bytes == 0
    region.close()
    region.close()
    assert not is_open(device)


def test_the_used_part_is_discarded_and_the_device_is_accepted_again(device, file):
    for _ in range(2):
        region = Region(device, "raw")
        for _ in range(2):
            move(region, region.allocate(4 * MiB).offset, os.urandom(1 * MiB), write=True)
        os.fsync(region.fd)
        assert os.stat(file).st_blocks * 512 >= 2 * MiB
        region.close()
        assert os.stat(file).st_blocks * 512 < 1 * MiB


def test_a_forked_child_that_closes_its_copy_discards_nothing(device):
    region, written = Region(device, "raw"), os.urandom(1 * MiB)
    extent = region.allocate(1 * MiB)
    move(region, extent.offset, written, write=True)
    run_forked(region.close)
    assert move(region, extent.offset, written) == written
    region.close()


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("mkfs.ext4 -q", "signatures of ext4"),
        ("mkfs.ext2 -q", "signatures of ext2"),
        ("mkswap", "signatures of swap"),
        ((SIZE - 512, b"EFI PART"), "signatures of gpt"),  # the copy at the end of a device
        ((0, b"\x01"), "data of an unknown kind"),
        ((1 * MiB - 1, b"\xff"), "data of an unknown kind"),
        ((300_000, b"notes"), "data of an unknown kind"),
    ],
)
def test_a_device_that_is_not_empty_is_refused_without_overwrite(device, caplog, content, name):
    if isinstance(content, str):
        program, *options = content.split()
        need(program)
        run(program, *options, device)
    else:
        put(device, *content)
    refusal(device, f"has {name} on it", "overwrite: true")
    with caplog.at_level(logging.WARNING, "offload_strategy"):
        Region(device, "raw", overwrite=True).close()
    assert any("being overwritten" in text and name in text for text in caplog.messages)


def test_a_device_that_is_in_use_is_refused_whatever_the_config_says(device, tmp_path):
    region = Region(device, "raw")
    with pytest.raises(ConfigError, match=r"in use.*\$LOCAL_RANK"):
        Region(device, "raw", overwrite=True)
    region.close()
    Region(device, "raw").close()
    with loop_disk(tmp_path / "mounted", SIZE) as disk:
        for overwrite in (False, True):
            refusal(disk.device, "is mounted", overwrite=overwrite)


def test_a_device_that_is_read_only_too_small_or_broken_is_refused(file):
    file.write_bytes(bytes(SIZE))
    with loop_device(file, read_only=True) as device:
        refusal(device, "read-only", "--setrw")
    with loop_device(file, 1 * MiB) as device:
        refusal(device, "nothing is left")
    with loop_device(file, SIZE) as device:
        refusal(device, "only 31 MiB available", capacity=SIZE)
        Region(device, "raw", capacity=SIZE - 1 * MiB).close()
        os.truncate(file, 0)
        refusal(device, "cannot be read: Input/output error", overwrite=True)


def test_a_user_who_may_not_open_it_is_told_the_group(device, monkeypatch):
    real = os.open

    def open_(path, flags, *args, **options):
        if str(path) == str(device):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    refusal(device, "Permission denied", f"usermod -aG {device.group()}")


def test_what_is_no_device_is_told_so(disk):
    assert "mkdir" not in refusal(Path("/dev/no-such-device"), "there is no device")
    refusal(disk, "overwrite: true is for block devices", overwrite=True)


def test_without_wipefs_a_device_is_refused_unless_it_may_be_overwritten(device, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: "/nowhere/wipefs")
    refusal(device, "Install util-linux")
    Region(device, "raw", overwrite=True).close()
