"""The whole analysis: what fits, what limits, what to change, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.planning import papers as paper_tables
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from offload_strategy.plan_runtime.space_requirements import optimizer_need
from offload_strategy.planner.analysis import analyse
from offload_strategy.planner.hardware import device, drive_set
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import Request
from offload_strategy.planner.saved_tensor_bytes import Workload
from offload_strategy.units import GiB

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def request(
    model="gpt3-13b", batch=32, gpu="a100-80g", ssd="12xP5510", memory=768 * GiB, **more
) -> Request:
    return Request(
        preset(model),
        Workload(batch, 1024),
        device(gpu),
        drive_set(ssd),
        memory,
        **more,
    )


def fit(found, what):
    (one,) = (fit for fit in found.fits if fit.what == what)
    return one


def test_disk_holds_states_twice_and_what_moves():
    found = analyse(request("gpt3-175b", 16, "4090"))
    p = request("gpt3-175b").shape.parameters
    assert found.streams_weights
    states = optimizer_need(12 * p, 2 * p, "commit")
    assert fit(found, "disk").needed_bytes == states + 2 * p + found.swap.moved_bytes
    assert fit(found, "disk").available_bytes == 12 * 3.84e12
    assert all(one.ok for one in found.fits)  # Fuyou trains it (section 5.3)


def test_weights_stay_where_the_device_has_memory_for_them():
    assert not analyse(request("gpt3-13b", 8, "a100-80g")).streams_weights
    assert analyse(request("gpt3-13b", 8, "4090")).streams_weights


def test_too_little_of_anything_says_what_to_take():
    found = analyse(request("gpt3-175b", 64, "4090", "1x980-pro", 4 * GiB))
    assert [one.ok for one in found.fits] == [False, False, False]
    device, host, disk, *_ = found.advice
    assert "device memory is" in device
    assert "host memory is" in host
    count = int(disk.split("take ")[1].split()[0])
    enough = analyse(request("gpt3-175b", 64, "4090", f"{count}x980-pro", 4 * GiB))
    assert fit(enough, "disk").ok
    short = analyse(request("gpt3-175b", 64, "4090", f"{count - 1}x980-pro", 4 * GiB))
    assert not fit(short, "disk").ok


def test_the_batch_that_is_advised_fits():
    found = analyse(request("gpt3-175b", 64, "4090"))
    batch = int(found.advice[0].split("a batch of ")[1].split()[0])
    assert fit(analyse(request("gpt3-175b", batch, "4090")), "device memory").ok
    assert not fit(analyse(request("gpt3-175b", batch + 1, "4090")), "device memory").ok


def test_limiting_drives_are_named_with_what_more_of_them_give():
    few = request(batch=32, ssd="2xP5510", update_rate=8e9)
    found = analyse(few)
    assert found.swap.limit("backward") == "backward paths"
    (line,) = (line for line in found.advice if line.startswith("the drives limit the backward"))
    gain = float(line.split("one more makes the step ")[1].split("x")[0])
    more = analyse(dataclasses.replace(few, drives=drive_set("3xP5510")))
    assert gain == pytest.approx(found.swap.time.seconds / more.swap.time.seconds, abs=0.005)
    assert gain > 1.1


def test_a_small_batch_is_told_of_a_larger_one():
    found = analyse(request(batch=8))
    (line,) = (line for line in found.advice if "batch is too small" in line)
    batch = int(line.split("one of ")[1].split()[0])
    gain = float(line.split("gives ")[1].split()[0])
    larger = analyse(request(batch=batch))
    assert larger.tokens_per_second / found.tokens_per_second == pytest.approx(gain, abs=0.005)


def test_a_slow_host_is_told_of():
    found = analyse(request(batch=16, update_rate=1e8))
    assert any(line.startswith("the update on the host limits") for line in found.advice)


def test_a_busy_device_needs_no_more_drives():
    found = analyse(request(batch=80, update_rate=8e9))
    assert any(line.startswith("the device limits the step") for line in found.advice)
    spare = [line for line in found.advice if "of the 12 drives are as fast" in line]
    enough = int(spare[0].split()[0])
    fewer = analyse(request(batch=80, ssd=f"{enough}xP5510", update_rate=8e9))
    assert fewer.swap.time.seconds <= 1.01 * found.swap.time.seconds


def test_lifespans_follow_from_what_is_written():
    found = analyse(request())
    rated, sequential, assumed = found.lifespans.values()
    endurance = 12 * 3.84e12 * 365 * 5
    assert rated * 365 == pytest.approx(endurance / found.written_per_day)
    assert sequential == pytest.approx(2.5 * rated)
    assert assumed == pytest.approx(2.5 * 86 * rated)
    assert any("by their rating the drives last" in line for line in found.advice)


def test_json_holds_what_the_table_says():
    found = analyse(request())
    data = json.loads(json.dumps(found.as_dict()))
    assert data["step"]["seconds"] == pytest.approx(found.swap.time.seconds)
    assert f"| the step | {data['step']['seconds']:.2f} |" in str(found)
    assert data["step"]["backward_limit"] == found.swap.limit("backward")
    assert data["fits"]["disk"]["fits"] is True
    assert set(data["drives"]["lifespan_years"]) == set(found.lifespans)
    for line in found.advice:
        assert line in str(found)
    assert all(math.isfinite(value) for value in data["step"]["limits_seconds"].values())


def test_every_assumption_has_its_figure_or_source():
    found = analyse(request(gpu="l40s"))
    text = "\n".join(found.as_dict()["assumptions"])
    assert "232 TFLOPS" in text  # 64 % of 362, as the A100 sustains of its own peak
    assert "64% of its peak" in text
    assert "Intel D7-P5510 product specification" in text
    given = analyse(request(gpu="l40s", sustained_flops=2e14, update_rate=1e9))
    assert given.as_dict()["assumptions"][0] == "device: 200 TFLOPS in a transformer block (given)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": -1}, "host_memory_bytes is -1"),
        ({"update_rate": 0.0}, "update_rate is 0"),
        ({"sustained_flops": -1.0}, "sustained_flops is -1"),
    ],
)
def test_nonsense_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        request(**change)


@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("section", ["## Before you buy or start", "### Search"])
def test_the_documentation_shows_what_its_commands_print(section, capsys):
    text = DOCS.read_text().split(section)[1]
    command = text.split("```console\nssd-offload ")[1].split("\n```")[0]
    assert ("--search" in command) == (section == "### Search")
    assert main(command.replace("\\\n", " ").split()) == 0
    assert capsys.readouterr().out.strip() in text


@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("table", paper_tables.TABLES, ids=lambda table: table.__name__)
def test_the_documentation_shows_the_tables_as_they_are(table):
    assert table() in DOCS.read_text()
