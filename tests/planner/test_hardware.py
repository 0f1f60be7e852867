"""Devices and drives by the names that people write, each figure with a source."""

from __future__ import annotations

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.planner import hardware


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a100-80g", "a100-80g-pcie"),
        ("A100 80GB", "a100-80g-pcie"),
        ("nvidia_a100_40g_sxm", "a100-40g-sxm"),
        ("RTX 4090", "rtx-4090"),
        ("GeForce-RTX-3090", "rtx-3090"),
        ("H200", "h200-141g-sxm"),
    ],
)
def test_a_device_is_found_however_it_is_written(written, name):
    assert hardware.device(written).name == name


@pytest.mark.parametrize(
    ("written", "count", "name"),
    [
        ("4xP5510", 4, "intel-p5510-3.84tb"),
        ("p5800x", 1, "intel-p5800x-1.6tb"),
        ("7 x Intel Optane P5800X", 7, "intel-p5800x-1.6tb"),
        ("wd-sn850x-2tb", 1, "wd-sn850x-2tb"),
        ("12×intel-p5510-7.68tb", 12, "intel-p5510-7.68tb"),
        ("2*990 PRO", 2, "samsung-990-pro-2tb"),
    ],
)
def test_drives_are_found_with_their_count(written, count, name):
    found = hardware.drive_set(written)
    assert (found.count, found.drive.name) == (count, name)
    assert found.capacity_bytes == count * found.drive.capacity_bytes


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        *(
            (hardware.drive_set, f"{count}xP5510", "whole number from 1 on, as in '4xP5510'")
            for count in ("0", "-1", "2.5")
        ),
        (hardware.device, "a100-90g", r"no device 'a100-90g'.*a100-80g-pcie"),
        (hardware.drive_set, "3xP5511", r"no drive 'P5511'.*intel-p5510-3\.84tb"),
        (hardware.device, "nothing like it", "no device 'nothing like it'.*a100-40g-pcie"),
    ],
)
def test_a_bad_count_or_name_is_refused_with_the_nearest_ones(find, name, message):
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_drive_writes_per_day_become_bytes():
    # 3.84 TB a day for 5 years, which the maker rounds to 7.0 PB; 1.6 TB a hundred times a day.
    assert hardware.drive_set("P5510").drive.endurance_bytes == pytest.approx(7.0e15, rel=0.01)
    assert hardware.drive_set("P5800X").drive.endurance_bytes == pytest.approx(292e15, rel=0.01)
    assert hardware.drive_set("4x980-pro-1tb").endurance_bytes == pytest.approx(2.4e15)


@pytest.mark.parametrize("kind", ["device", "drive"])
def test_every_figure_has_a_source_and_makes_sense(kind):
    for name, entry in hardware.table(kind).items():
        assert entry.name == name
        assert all(len(source) > 5 for source in entry.sources.values())
        fields = set(type(entry).__slots__) - {"sources", "name"}
        figures = [getattr(entry, field) for field in fields]
        assert all(figure is None or figure > 0 for figure in figures)
        assert len(entry.sources) >= sum(figure is not None for figure in figures)


def test_what_is_sustained_or_measured_is_below_the_data_sheet():
    for entry in hardware.table("device").values():
        assert entry.sustained_flops is None or entry.sustained_flops <= entry.flops
        assert entry.measured_link is None or entry.measured_link <= entry.link
