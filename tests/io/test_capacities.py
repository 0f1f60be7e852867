"""The capacities of all tiers and processes together, against what their disks have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.io.regions.directory_check import check_capacities
from offload_strategy.units import GiB, MiB, format_size
from tests.io.loop_devices import loop_device, loop_disk


class Disks(NamedTuple):
    """Two small file systems, and what each of them can give."""

    first: Path
    second: Path
    usable: int


@pytest.fixture
def disks(tmp_path):
    with (
        loop_disk(tmp_path / "0", 128 * MiB) as first,
        loop_disk(tmp_path / "1", 128 * MiB) as second,
    ):
        links = tmp_path / "nvme0", tmp_path / "nvme1"
        for link, disk in zip(links, (first, second), strict=True):
            link.symlink_to(disk.directory)
        yield Disks(*links, shutil.disk_usage(links[0]).free - 64 * MiB)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def processes(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))


def test_tiers_that_fit_together_are_accepted(disks, tmp_path):
    half = disks.usable // 2
    check_capacities([("a", disks.first, half), ("b", disks.first, half)])
    check_capacities([("a", disks.first, disks.usable), ("b", disks.second, disks.usable)])
    # Without a capacity a tier takes what the others leave.
    check_capacities([("a", disks.first, disks.usable), ("b", disks.first, None)])
    check_capacities([("a", disks.first, None), ("b", disks.first, None)])
    check_capacities([])
    # Whoever opens a path that is not there says more.
    check_capacities([("a", tmp_path / "gone", 1000 * GiB), ("b", tmp_path / "gone", 1000 * GiB)])


def test_tiers_on_one_disk_that_do_not_fit_together_are_named_with_the_sums(disks):
    part = disks.usable // 2 + 1 * MiB
    inside = disks.first / "inside"
    inside.mkdir()
    with pytest.raises(ConfigError) as refused:
        check_capacities([("a", disks.first, part), ("b", inside, part), ("c", disks.second, part)])
    message = str(refused.value)
    assert f"'a' {format_size(part)} + 'b' {format_size(part)} = {format_size(2 * part)}" in message
    assert "'c'" not in message
    assert str(disks.first) in message
    assert f"only {format_size(disks.usable)} available" in message
    assert f"lower them to {format_size(disks.usable)} together" in message


def test_every_process_of_the_machine_takes_its_own_file(disks, monkeypatch):
    quarter = disks.usable // 4
    processes(monkeypatch, 3, 4)
    check_capacities([("a", disks.first, quarter)])
    with pytest.raises(ConfigError) as refused:
        check_capacities([("a", disks.first, quarter + 1 * MiB)])
    message = str(refused.value)
    assert f"'a' {format_size(quarter + 1 * MiB)} × 4 processes" in message
    assert f"lower them to {format_size(quarter)} together for each of the 4 processes" in message
    assert "$LOCAL_RANK" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_with_a_disk_each_share_nothing(disks, monkeypatch, rank):
    processes(monkeypatch, rank, 2)
    # as /mnt/nvme$LOCAL_RANK reads for this process
    check_capacities([("a", (disks.first, disks.second)[rank], disks.usable)])


def test_processes_with_a_directory_each_on_one_disk_share_it(disks, monkeypatch):
    # The digit of the mount point is the rank's as well; it is the rank's folder that counts.
    for rank in range(4):
        (disks.first / f"rank{rank}").mkdir()
    processes(monkeypatch, 3, 4)
    with pytest.raises(ConfigError, match="× 4 processes"):
        check_capacities([("a", disks.first / "rank3", disks.usable)])


def test_what_the_launcher_left_unreadable_is_one_process(disks, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    check_capacities([("a", disks.first, disks.usable)])


def test_two_tiers_cannot_be_one_device(tmp_path):
    with loop_device(tmp_path / "0.img", 8 * MiB) as device:
        (tmp_path / "link").symlink_to(device)
        check_capacities([("a", device, 1 * GiB)])  # its space knows how large it is
        with pytest.raises(ConfigError, match=r"'a' and 'b'.*the same block device"):
            check_capacities([("a", device, None), ("b", tmp_path / "link", None)])
