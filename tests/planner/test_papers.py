"""The planner beside what SSDTrain, MemAscend and Fuyou report, autograd, and the documentation."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from benchmarks.planning.papers import (
    FOUR_980,
    MEGATRON_RUNS,
    TABLES,
    fuyou,
    host_memory,
    mask_bytes,
    part,
    required_write_rate,
)
from offload_strategy.cli import main
from offload_strategy.errors import ConfigError
from offload_strategy.planner.hardware import SSDTRAIN, lifespan_seconds
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.saved_tensor_bytes import (
    Workload,
    activation_bytes,
    layer_activation_bytes,
    layer_tensors,
)
from offload_strategy.planner.search.settings import weight_buffers, weights_in_flight_bytes
from offload_strategy.planner.step_time import Rates, StageLoad, StepTime
from offload_strategy.planner.transformer_shape import TransformerShape
from offload_strategy.units import SECONDS_PER_YEAR, GiB
from tests.training import Block, saved_storages

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


# ------------------------------------------------------------------ the documentation
@pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
def test_the_documentation_shows_what_its_commands_and_tables_print(capsys):
    text = DOCS.read_text()
    for section in ("## Before you buy", "### Search"):
        shown = text.split(section)[1]
        command = shown.split("```console\nssd-offload ")[1].split("\n```")[0]
        assert ("--search" in command) == (section == "### Search")
        assert main(command.replace("\\\n", " ").split()) == 0
        printed = capsys.readouterr().out.partition("\n# fastest\n")[0].strip()
        assert printed in shown
    for table in TABLES:
        assert table() in text, table.__name__


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


def test_drives_last_as_long_as_their_rating_by_what_is_written():
    # 600 TBW, 100 GB in a step of 10 s: 6,000 steps.
    assert lifespan_seconds(600e12, 10, 100e9) == pytest.approx(60_000)
    assert lifespan_seconds(600e12, 10, 0) == math.inf
    # Without what SSDTrain assumes of wear, its drives would last weeks.
    run = MEGATRON_RUNS[0]
    rated = lifespan_seconds(FOUR_980, run.step_seconds, run.activation_bytes())
    assert rated / 86400 < 14


# ------------------------------------------------------------------ what autograd saves
def test_a_layer_saves_megatrons_34_bytes_less_what_is_said():
    # s b h (10 + 24/t) with masks (Korthikanti et al., equation 2, without scores of attention).
    for t in (1, 2, 8):
        work, shape = Workload(2, 2048), TransformerShape("gpt", 1, 4096, 32, 50257)
        statistics, embedding = 4 * 2 * 2048 * 32 // t, 2 * 2048 * 4096
        masks = mask_bytes(shape, work) - embedding
        expected = 2 * 2048 * 4096 * (10 + 24 / t) + statistics
        assert layer_activation_bytes(part(shape, t), work) + masks == expected


def test_small_tensors_stay_and_decoders_attend_twice():
    encoder, work = TransformerShape("t5", 4, 64, 4, 100), Workload(2, 32)
    assert activation_bytes(encoder, work) == 0
    both = dataclasses.replace(encoder, decoder_layers=2)
    tensors = layer_tensors(both, work, crosses=True)
    crossing = [t for t in 2 * tensors if t.name.startswith("cross")]
    more = activation_bytes(both, work, 0) - activation_bytes(encoder, work, 0)
    assert more == sum(tensor.nbytes for tensor in crossing) > 0


def test_a_layer_of_torch_saves_what_is_counted():
    b, s, h, heads = 2, 16, 32, 4
    layer, x = Block(h).eval(), torch.randn(b, s, h, requires_grad=True)
    storages = saved_storages(lambda: layer(x).sum(), layer.parameters())
    statistics = 4 * 2 * b * s  # of norms
    saved = sum(nbytes for one in storages if (nbytes := one.nbytes()) > statistics)
    shape = TransformerShape("gpt", 1, h, heads, 100)
    counted = layer_activation_bytes(shape, Workload(b, s, dtype_bytes=4))
    assert saved == pytest.approx(counted, rel=0.02)


# ------------------------------------------------------------------ MemAscend: host memory
def test_the_parts_for_qwen_are_those_of_section_5a():
    parts = host_memory(preset("qwen2.5-7b"), memascend=False)
    found = {name: nbytes / GiB for name, nbytes in parts.items()}
    assert found.pop("states") + found.pop("swap-out") == pytest.approx(11.17, abs=0.005)
    # The paper's overheads hold the process as well: 24.90 GiB against 1.63 GiB without rounding.
    assert found.pop("rounding of pinned buffers") == pytest.approx(24.90 - 1.63, abs=0.1)
    expected = {"gradients": 28.37, "overflow check": 35.46, "weights in flight": 9.14}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.005)


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
    shape, left = preset("gpt3-13b"), found.placement.split("activations").total_bytes
    p, flops = shape.parameters, shape.forward_flops(64, 1024)
    again = 40 * shape.layer_flops(64, 1024)
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
            "forward computation": flops / 164e12,
            # States, weights and activations are read, states and weights written (7). States
            # cross the link, as they are updated on the device.
            "backward, update paths": ((14 * p + left) / 6.5e9 + 14 * p / 3.4e9) / 6,
            "backward, update link": (14 * p + left) / 32e9,
            "backward, update computation": (2 * flops + again) / 164e12,
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
