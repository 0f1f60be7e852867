"""Drives, host memory and stages of a step beside what SSDTrain, MemAscend and Fuyou report."""

import dataclasses
import math

import pytest

from benchmarks.planning.papers import (
    FOUR_980,
    MEGATRON_RUNS,
    fuyou,
    host_memory,
    required_write_rate,
)
from offload_strategy.errors import ConfigError
from offload_strategy.planner.hardware import SSDTRAIN, lifespan_seconds
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.search.settings import weight_buffers, weights_in_flight_bytes
from offload_strategy.planner.step_time import Rates, StageLoad, StepTime
from offload_strategy.units import SECONDS_PER_YEAR, GiB

# Figures that the tables of docs/planning.md have are tested in test_documentation.py.


# ------------------------------------------------------------------ SSDTrain: drives
@pytest.mark.parametrize("case", MEGATRON_RUNS)
def test_megatrons_runs_take_as_many_days_and_stay_within_ssdtrains_bounds(case):
    # 300 billion tokens, which the table gives in whole days.
    steps = 300e9 / (case.sequences * 2048)
    assert steps * case.step_seconds / 86400 == pytest.approx(case.days, rel=0.015)
    # A step that moves activations need not compute them again: it takes 3/4 of the measured one.
    saved = case.activation_bytes()
    for step in (case.step_seconds, 0.75 * case.step_seconds):
        assert required_write_rate(saved, step) <= 12.1e9
        assert lifespan_seconds(FOUR_980, step, saved, SSDTRAIN) / SECONDS_PER_YEAR > 2


def test_the_bounds_rest_on_what_the_paper_assumes():
    # The bounds hold for tensor parallelism only if it divides the norms as well, which the runs
    # of 2021 did not.
    run = MEGATRON_RUNS[6]
    assert required_write_rate(run.activation_bytes(False), run.step_seconds) > 2 * 12.1e9
    # Without what the paper assumes of wear, the drives would last weeks.
    run = MEGATRON_RUNS[0]
    rated = lifespan_seconds(FOUR_980, run.step_seconds, run.activation_bytes())
    assert rated / 86400 < 14
    # 600 TBW, 100 GB in a step of 10 s: 6,000 steps.
    assert lifespan_seconds(600e12, 10, 100e9) == pytest.approx(60_000)
    assert lifespan_seconds(600e12, 10, 0) == math.inf


# ------------------------------------------------------------------ MemAscend: host memory
def test_the_parts_for_qwen_are_those_of_section_5a():
    parts = host_memory(preset("qwen2.5-7b"), memascend=False)
    assert parts["gradients"] / GiB == pytest.approx(28.37, abs=0.005)
    assert parts["overflow check"] / GiB == pytest.approx(35.46, abs=0.005)
    assert parts["weights in flight"] / GiB == pytest.approx(9.14, abs=0.005)
    assert (parts["states"] + parts["swap-out"]) / GiB == pytest.approx(11.17, abs=0.005)
    # The paper's overheads hold the process as well: 24.90 GiB against 1.63 GiB without rounding.
    assert parts["rounding of pinned buffers"] / GiB == pytest.approx(24.90 - 1.63, abs=0.1)


def test_buffers_of_weights_are_those_of_memascends_pool():
    qwen = preset("qwen2.5-7b")
    assert weights_in_flight_bytes(qwen, 1) / GiB == pytest.approx(2.46, abs=0.005)
    # Embedding and head; gate, up and down; query and output; key and value.
    assert list(weight_buffers(qwen).values()) == [2, 3, 2, 2]
    assert list(weight_buffers(qwen, 3).values()) == [2, 9, 6, 6]
    # A model never needs more buffers than it has layers, and small weights need none.
    shape = dataclasses.replace(preset("gpt2"), layers=2, hidden=1024, heads=16)
    assert weight_buffers(shape, 8) == weight_buffers(shape, 2)
    assert weight_buffers(dataclasses.replace(shape, hidden=16, vocabulary=100)) == {}
    with pytest.raises(ConfigError, match="blocks_in_flight is 0"):
        weight_buffers(qwen, 0)


# ---------------------------------------------------------------------- Fuyou: the equations
def test_a_step_of_fuyous_by_hand():
    # GPT-3 13B, 6 drives of 6.5 and 3.4 GB/s, a link of 32 GB/s; one at a time, both at once.
    found = fuyou(64, 6)
    p, left = preset("gpt3-13b").parameters, found.placement.split("activations").total_bytes
    taken = {
        f"{stage.name} {resource}": stage.times * seconds
        for stage in found.step.stages
        for resource, seconds in stage.limits.items()
    }
    assert taken == pytest.approx(
        {
            # Weights are read and activations written (equation 4), both over the link (3).
            "forward paths": (2 * p / 6.5e9 + left / 3.4e9) / 6,
            "forward link": max(2 * p, left) / 32e9,
            "forward computation": preset("gpt3-13b").forward_flops(64, 1024) / 164e12,
            # States, weights and activations are read, states and weights written (7). States
            # cross the link, as they are updated on the device.
            "backward, update paths": ((14 * p + left) / 6.5e9 + 14 * p / 3.4e9) / 6,
            "backward, update link": (14 * p + left) / 32e9,
            "backward, update computation": (
                2 * preset("gpt3-13b").forward_flops(64, 1024)
                + 40 * preset("gpt3-13b").layer_flops(64, 1024)
            )
            / 164e12,
            **{f"step() {resource}": 0 for resource in ("computation", "link", "paths")},
        },
        rel=1e-3,
    )


LOAD = StageLoad(2.0, to_device=30e9, from_device=40e9, read=6e9, written=4e9)


@pytest.mark.parametrize(
    ("rates", "limits"),
    [
        # Paths of 2 and 4 GB/s that do one direction at a time; a link that does both.
        ({}, {"computation": 2.0, "link": 4.0, "paths": 4.0}),
        ({"duplex": True}, {"computation": 2.0, "link": 4.0, "paths": 3.0}),
        # A model on the host has no link to wait for.
        ({"link": math.inf}, {"computation": 2.0, "link": 0.0, "paths": 4.0}),
        # What moves takes computing time from the cores that train.
        ({"io_overhead": 1e-10}, {"computation": 3.0, "link": 4.0, "paths": 4.0}),
    ],
)
def test_a_stage_takes_as_long_as_the_slowest_of_its_parts(rates, limits):
    rates = Rates(**{"read": 2e9, "write": 4e9, "link": 10e9} | rates)
    stage = rates.stage("backward", LOAD, times=3)
    assert stage.limits == pytest.approx(limits)
    assert stage.seconds == max(limits.values())
    step = StepTime((stage, rates.stage("step()", StageLoad(computation=1.0))))
    assert step.seconds == pytest.approx(3 * stage.seconds + 1)
    assert step.limit == stage.limit
    assert step.limited_seconds["computation"] == pytest.approx(1.0)
    moved = {"to_device": 90e9, "from_device": 120e9, "read": 18e9, "written": 12e9}
    assert {way: step.moved_bytes(way) for way in moved} == pytest.approx(moved)
