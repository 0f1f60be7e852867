"""Regions: their files, their extents, and their capacities against what the disks have."""

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_strategy.errors import ConfigError, StorageError
from offload_strategy.io.regions import region as region_module
from offload_strategy.io.regions.directory_check import check_capacities, check_directory
from offload_strategy.io.regions.region import ExtentAllocator, Region
from offload_strategy.units import PAGE_BYTES, GiB, MiB, format_size
from tests.io.loop_devices import loop_device, loop_disk
from tests.support import raising


@pytest.fixture(params=["unnamed", "unlinked"])
def region(request, disk, monkeypatch):
    """A region in a file that was created unnamed, and one in a file that was unlinked."""
    if request.param == "unlinked":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no unnamed files")
    before = os.umask(0)  # files are private all the same
    made = Region(disk, "nvme", capacity=64 * MiB)
    os.umask(before)
    yield made
    made.close()


def test_the_file_has_no_name_its_owner_alone_may_read_it_and_blocks_are_there_early(region, disk):
    status = os.fstat(region.fd)
    assert (list(disk.iterdir()), status.st_nlink) == ([], 0)
    assert stat.S_ISREG(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert not os.get_inheritable(region.fd)
    assert status.st_blocks == 0
    assert region.allocate(10 * MiB) is not None
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


def test_a_capacity_is_what_the_disk_has_less_a_reserve_and_no_more(disk, monkeypatch):
    free = shutil.disk_usage(disk).free
    region = Region(disk, "nvme")
    # Others write to the disk as well.
    assert abs(region.capacity - (free - region_module.RESERVE_BYTES)) < 1 * GiB
    region.close()
    capacity = free + 1000 * GiB
    with pytest.raises(ConfigError, match=r"'nvme'.*Lower the capacity") as refused:
        Region(disk, "nvme", capacity=capacity)
    assert str(disk) in str(refused.value)
    assert format_size(capacity) in str(refused.value)
    usage = shutil._ntuple_diskusage(100 * MiB, 99 * MiB, 1 * MiB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"'nvme'.*too little free space \(1 MiB\)"):
        Region(disk, "nvme")


def test_what_other_programs_used_meanwhile_is_not_allocated(region, monkeypatch):
    real = os.fstatvfs(region.fd)
    left = region_module.RESERVE_BYTES + 3 * MiB
    full = SimpleNamespace(f_frsize=real.f_frsize, f_bavail=left // real.f_frsize)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: full)
    assert region.allocate(4 * MiB) is None
    assert region.used_bytes == 0
    assert region.allocate(2 * MiB) is not None
    assert os.fstat(region.fd).st_size <= 3 * MiB


SPARSE = [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, None]


@pytest.mark.parametrize("answer", [*SPARSE, errno.ENOSPC, errno.EIO])
def test_a_system_may_not_preallocate_be_full_or_fail(region, monkeypatch, answer):
    if answer is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", raising(OSError(answer, os.strerror(answer))))
    if answer in SPARSE:
        assert region.allocate(1 * MiB) is not None
        assert os.fstat(region.fd).st_size == 64 * MiB
        return
    if answer == errno.ENOSPC:
        assert region.allocate(1 * MiB) is None
    else:
        with pytest.raises(StorageError, match=r"tier 'nvme'.*64 MiB.*Input/output error"):
            region.allocate(1 * MiB)
    assert region.used_bytes == 0
    monkeypatch.undo()
    assert region.allocate(64 * MiB) is not None


@pytest.mark.parametrize("direct", ["auto", False])
def test_direct_io_is_used_unless_it_is_not_wanted(disk, caplog, direct):
    region = Region(disk, "nvme", capacity=1 * MiB, direct=direct)
    if direct and not region.direct:
        pytest.skip("the temporary directory does not support direct I/O")
    assert region.direct == bool(direct)
    assert bool(fcntl.fcntl(region.fd, fcntl.F_GETFL) & os.O_DIRECT) == region.direct
    assert caplog.messages == []
    region.close()


@pytest.mark.parametrize(
    "how", ["at open", "at the first write", "by a short write", "no such flag"]
)
def test_where_direct_io_is_refused_auto_warns_once_and_true_is_an_error(
    disk, monkeypatch, caplog, how
):
    real_fcntl, direct = fcntl.fcntl, os.O_DIRECT
    refuse = raising(OSError(errno.EINVAL, os.strerror(errno.EINVAL)))

    def fcntl_(fd, command, flags=0):
        return refuse() if flags & direct else real_fcntl(fd, command, flags)

    if how == "no such flag":
        monkeypatch.delattr(os, "O_DIRECT")
    elif how == "at open":
        monkeypatch.setattr(fcntl, "fcntl", fcntl_)
    else:
        monkeypatch.setattr(os, "pwrite", refuse if how == "at the first write" else lambda *_: 512)
    with caplog.at_level(logging.WARNING, "offload_strategy"):
        region = Region(disk, "nvme", capacity=1 * MiB, direct="auto")
    assert not region.direct
    (message,) = caplog.messages
    assert "direct I/O" in message
    assert "nvme" in message
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


# ---------------------------------------------------------------------- extents
SIZES = st.integers(0, 4 * PAGE_BYTES)


def place_for(taken, pages, large):
    """Where so many pages go in a region whose pages are taken (x) or free (.)."""
    free = [found.span() for found in re.finditer(r"\.+", taken)]
    fitting = [(begin, end) for begin, end in free if end - begin >= pages]
    holes = [(end - begin, begin) for begin, end in fitting if end < len(taken)]
    if not holes:  # what is behind the last page that is taken comes last
        return fitting[0][0] if fitting else None
    return min(begin for _, begin in holes) if large else min(holes)[1]


@settings(max_examples=400, deadline=None)
@given(
    total=st.sampled_from([16, 40]),
    large_pages=st.sampled_from([2, 100]),
    steps=st.lists(st.tuples(st.booleans(), SIZES), min_size=60, max_size=80),
)
def test_small_extents_take_the_best_fit_and_large_ones_the_lowest_place(total, large_pages, steps):
    allocator, extents = ExtentAllocator(total * PAGE_BYTES + 17), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_module, "LARGE_BYTES", large_pages * PAGE_BYTES)
        for allocates, number in steps:
            if allocates:
                taken = ["."] * total
                for offset, nbytes in extents:
                    begin, end = offset // PAGE_BYTES, (offset + nbytes) // PAGE_BYTES
                    taken[begin:end] = "x" * (end - begin)
                pages = max(1, -(-number // PAGE_BYTES))
                place = place_for("".join(taken), pages, pages >= large_pages)
                extent = allocator.allocate(number)
                if place is None:
                    assert extent is None
                else:
                    assert extent == (place * PAGE_BYTES, pages * PAGE_BYTES)
                    extents.append(extent)
            elif extents:
                allocator.free(extents.pop(number % len(extents)))
            assert allocator.used_bytes == sum(extent.nbytes for extent in extents)
    for extent in extents:
        allocator.free(extent)
        with pytest.raises(AssertionError, match="freed twice"):
            allocator.free(extent)


# ---------------------------------------------------------------------- capacities of all tiers
@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Two small file systems, and what each of them can give."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    links = tmp_path / "nvme0", tmp_path / "nvme1"
    with loop_disk(tmp_path, 128 * MiB) as first, loop_disk(tmp_path, 128 * MiB) as second:
        for link, made in zip(links, (first, second), strict=True):
            link.symlink_to(made.directory)
        yield *links, shutil.disk_usage(links[0]).free - 64 * MiB


def test_tiers_on_one_disk_fit_together_or_are_named_with_the_sums(disks, tmp_path):
    first, second, usable = disks
    half = usable // 2
    check_capacities([("a", first, half), ("b", first, half)])
    check_capacities([("a", first, usable), ("b", second, usable)])
    # Without a capacity a tier takes what the others leave.
    check_capacities([("a", first, usable), ("b", first, None)])
    check_capacities([("a", first, None), ("b", first, None)])
    check_capacities([])
    # Whoever opens a path that is not there says more.
    check_capacities([("a", tmp_path / "gone", 1000 * GiB), ("b", tmp_path / "gone", 1000 * GiB)])
    part, inside = half + 1 * MiB, first / "inside"
    inside.mkdir()
    with pytest.raises(ConfigError) as refused:
        check_capacities([("a", first, part), ("b", inside, part), ("c", second, part)])
    message = str(refused.value)
    assert f"'a' {format_size(part)} + 'b' {format_size(part)} = {format_size(2 * part)}" in message
    assert "'c'" not in message
    assert str(first) in message
    assert f"only {format_size(usable)} available" in message
    assert f"lower them to {format_size(usable)} together" in message


def test_every_process_of_the_machine_takes_its_own_file(disks, monkeypatch):
    def processes(rank, size):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))

    first, second, usable = disks
    quarter, more = usable // 4, usable // 4 + 1 * MiB
    processes(3, 4)
    check_capacities([("a", first, quarter)])
    with pytest.raises(ConfigError) as refused:
        check_capacities([("a", first, more)])
    message = str(refused.value)
    assert f"'a' {format_size(more)} × 4 processes" in message
    assert f"lower them to {format_size(quarter)} together for each of the 4 processes" in message
    assert "$LOCAL_RANK" in message
    # The digit of the mount point is the rank's as well; it is the rank's folder that counts.
    for rank in range(4):
        (first / f"rank{rank}").mkdir()
    with pytest.raises(ConfigError, match="× 4 processes"):
        check_capacities([("a", first / "rank3", usable)])
    # With a disk each, as /mnt/nvme$LOCAL_RANK reads for a process, they share nothing.
    for rank, own in enumerate((first, second)):
        processes(rank, 2)
        check_capacities([("a", own, usable)])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")  # what cannot be read is one process
    check_capacities([("a", first, usable)])


def test_two_tiers_cannot_be_one_device(tmp_path):
    with loop_device(tmp_path / "0.img", 8 * MiB) as device:
        (tmp_path / "link").symlink_to(device)
        check_capacities([("a", device, 1 * GiB)])  # its space knows how large it is
        with pytest.raises(ConfigError, match=r"'a' and 'b'.*the same block device"):
            check_capacities([("a", device, None), ("b", tmp_path / "link", None)])
