"""Steps, drives and host memory beside what Fuyou, SSDTrain and MemAscend report."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning.papers import FOUR_980, MEGATRON_RUNS, fuyou, tflops
from offload_strategy.errors import ConfigError
from offload_strategy.planner.analysis import (
    AS_RATED,
    SSDTRAIN,
    lifespan_seconds,
    required_write_rate,
)
from offload_strategy.planner.host_memory_needs import host_memory, weight_buffers
from offload_strategy.planner.model_presets import preset
from offload_strategy.planner.request import SECONDS_PER_YEAR
from offload_strategy.planner.step_estimate import best_swap, swaps
from offload_strategy.planner.step_time import Rates, predict_step
from offload_strategy.units import GiB

# Figures that the tables of docs/planning.md have are tested in test_analysis.py.


# ------------------------------------------------------------------ Fuyou: steps of GPT-3
def test_throughput_on_an_a100_reaches_what_the_paper_reports():
    # Section 5.3: at most 202 TFLOPS for 13B, 173 for 175B at a batch that the text does not give.
    assert tflops(best_swap(fuyou("13b", 64, "a100-80g"))) == pytest.approx(202, rel=0.05)
    reached = [tflops(best_swap(fuyou("175b", batch, "a100-80g"))) for batch in (16, 64)]
    assert reached[0] < 173 < reached[1]


def test_the_parts_of_a_step_by_hand():
    # 175B at batch 16 on a 4090 and twelve drives of 6.5 and 3.4 GB/s, by the paper's equations.
    run = fuyou("175b", 16, "rtx-4090")
    p, found = run.shape.parameters, next(swaps(run))
    inputs = 16 * 1024 * 12288 * 2 * 96
    assert found.moved_bytes == inputs
    limits = found.time.resource_seconds
    assert limits["forward paths"] == pytest.approx((2 * p / 6.5e9 + inputs / 3.4e9) / 12)
    read, written = 14 * p + inputs, 14 * p
    assert limits["backward paths"] == pytest.approx((read / 6.5e9 + written / 3.4e9) / 12)
    assert limits["backward link"] == pytest.approx((2 * p + inputs) / 32e9)
    head = run.shape.head_flops(16, 1024) / 164e12
    assert limits["backward computation"] == pytest.approx(3 * limits["forward computation"] - head)
    assert found.time.written_bytes == pytest.approx(inputs + 14 * p)


@pytest.mark.parametrize(
    ("batch", "rate", "moves"),
    [
        # 0, 0.72 and 0.94 of what is inside layers. The paper says 0 at 32 because communication
        # limits; here the update does, which nothing that moves can shorten either.
        *((32, None, False), (64, None, True), (80, None, True)),
        # The trend does not hang on the rate of updates. 0.93 billion: what batch 8 leaves if FLOP
        # computed again do not count as throughput.
        *((32, 0.4e9, False), (80, 0.4e9, True), (32, 0.93e9, False), (80, 0.93e9, True)),
        # With the drives' data sheets alone nothing but the device would limit at batch 32.
        (32, 1e12, True),
    ],
)
def test_the_best_swap_has_the_trend_of_figure_9(batch, rate, moves):
    found = best_swap(fuyou("13b", batch, "a100-80g", update_rate=rate))
    assert (found.coefficient > 0) is moves
    assert not found.limit("backward").endswith("computation") or moves


def test_what_costs_most_to_compute_again_moves_first_and_the_best_is_no_slower():
    run = fuyou("13b", 64, "a100-80g", 3)
    tried = list(swaps(run))
    assert len(tried) == 1 + 5 * 40
    parts = {part.name: part.output_bytes for part in run.shape.parts(64, 1024)}
    order = [parts[name] for name in ("down", "qkv", "projection", "up", "attention")]
    assert [one.inner_bytes for one in tried[::40]] == [40 * sum(order[:n]) for n in range(6)]
    best = min(found.time.seconds for found in tried)
    assert best_swap(run).time.seconds == pytest.approx(best)


def test_weights_that_stay_do_not_move():
    run = fuyou("13b", 8, "a100-80g")
    stay, stream = (best_swap(run, streams_weights=value).time for value in (False, True))
    p = run.shape.parameters
    for way, bytes_each in (("read", 4), ("written", 2)):
        less = stream.moved_bytes(way) - stay.moved_bytes(way)
        assert less == pytest.approx(bytes_each * p)


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


def test_the_formulas_by_hand():
    # 600 TBW, 100 GB in a step of 10 s: 6,000 steps.
    assert lifespan_seconds(600e12, 10, 100e9) == pytest.approx(60_000)
    assert lifespan_seconds(600e12, 10, 100e9, SSDTRAIN) == pytest.approx(60_000 * 2.5 * 86)
    assert lifespan_seconds(600e12, 10, 0, AS_RATED) == math.inf
    assert required_write_rate(100e9, 10) == pytest.approx(20e9)


# ------------------------------------------------------------------ MemAscend: host memory
def test_the_parts_for_qwen_are_those_of_section_5a():
    parts = host_memory(preset("qwen2.5-7b"), "zero-infinity")
    assert parts["gradients"] / GiB == pytest.approx(28.37, abs=0.005)
    assert parts["overflow check"] / GiB == pytest.approx(35.46, abs=0.005)
    assert parts["weights in flight"] / GiB == pytest.approx(9.14, abs=0.005)
    assert (parts["states"] + parts["swap-out"]) / GiB == pytest.approx(11.17, abs=0.005)
    # The paper's overheads hold the process as well: 24.90 GiB against 1.63 GiB without rounding.
    assert parts["rounding of pinned buffers"] / GiB == pytest.approx(24.90 - 1.63, abs=0.1)
    exact = host_memory(preset("qwen2.5-7b"), "memascend")
    assert exact["weights in flight"] / GiB == pytest.approx(2.46, abs=0.005)
    assert "overflow check" not in exact
    # Embedding and head; gate, up and down; query and output; key and value.
    assert list(weight_buffers(preset("qwen2.5-7b")).counts.values()) == [2, 3, 2, 2]
    assert list(weight_buffers(preset("qwen2.5-7b"), 3).counts.values()) == [2, 9, 6, 6]


def test_a_model_never_needs_more_buffers_than_it_has_layers_and_small_weights_need_none():
    shape = dataclasses.replace(preset("gpt2"), layers=2, hidden=1024, heads=16)
    assert weight_buffers(shape, 8) == weight_buffers(shape, 2)
    assert weight_buffers(dataclasses.replace(shape, hidden=16, vocabulary=100)).exact_bytes == 0


def test_streaming_needs_no_gradients_of_the_whole_model():
    # Fuyou trains 65B in 128 GB of host memory, where ZeRO-Infinity fails at 13B (section 5.2).
    assert sum(host_memory(preset("gpt3-65b"), "streamed").values()) < 128e9
    assert sum(host_memory(preset("gpt3-13b"), "zero-infinity").values()) > 128e9


def test_nonsense_about_host_memory_is_refused():
    with pytest.raises(ConfigError, match="blocks_in_flight is 0"):
        weight_buffers(preset("gpt2"), 0)


# ---------------------------------------------------------------------- Fuyou: the equations
# GPT-3 13B as the paper trains it: fp16 weights and gradients, 12 bytes of states a parameter, six
# SSDs of 6 GB/s in all directions, a link of 20 GB/s.
P = 13e9
GPT3_13B = {
    "forward_seconds": 2.0,
    "backward_seconds": 4.0,
    "update_seconds": 5.0,
    "weights_bytes": 2 * P,
    "gradients_bytes": 2 * P,
    "states_read_bytes": 12 * P,
    "states_written_bytes": 12 * P,
    "activations_bytes": 40e9,
}


@pytest.mark.parametrize("paths", [6, 12])
def test_the_equations_by_hand(paths):
    rates = Rates(read=6e9, write=6e9, paths=paths, link=20e9)
    predicted = predict_step(rates, **GPT3_13B)
    assert predicted.resource_seconds == pytest.approx(
        {
            # 26 GB of weights are read and 40 GB of activations written at 36 GB/s (eq. 4); over
            # the link 40 GB at 20 GB/s (eq. 3).
            "forward computation": 2.0,
            "forward link": 2.0,
            "forward paths": 66 / 6 / paths,
            # 156 + 26 + 40 GB read, 156 + 26 GB written (eq. 7); over the link 26 + 40 GB (6).
            "backward computation": 4.0,
            "update": 5.0,
            "backward link": 66 / 20,
            "backward paths": (222 + 182) / 6 / paths,
        }
    )
    assert predicted.stage("forward").seconds == pytest.approx(2.0)
    backward = max(5.0, 404 / 6 / paths)
    assert predicted.stage("backward").seconds == pytest.approx(backward)
    assert predicted.seconds == pytest.approx(2.0 + backward)
    moved = {"to_device": 92e9, "from_device": 66e9, "read": 248e9, "written": 222e9}
    assert {way: predicted.moved_bytes(way) for way in moved} == pytest.approx(moved)


MOVING = {"states_read_bytes": 3e9, "states_written_bytes": 1e9}


@pytest.mark.parametrize(
    ("moved", "rates", "forward", "backward"),
    [
        # On shared cores an update is added to backward, and still hides behind the paths.
        ({}, {}, 1.0, 2.0),
        ({}, {"shared_cores": True}, 1.0, 2.5),
        (MOVING, {"shared_cores": True}, 1.0, 4.0),
        (MOVING, {"shared_cores": True, "duplex": True}, 1.0, 3.0),
        # What moves takes computing time from shared cores, and from no others.
        (
            MOVING | {"activations_bytes": 2e9},
            {"read": 1e12, "write": 1e12, "shared_cores": True, "io_overhead": 1e-10},
            1.2,
            3.1,
        ),
        (MOVING, {"read": 1e12, "write": 1e12, "io_overhead": 1e-10}, 1.0, 2.0),
        # A model on the host has no link to wait for.
        ({"gradients_bytes": 1e15}, {"link": math.inf}, 1.0, 2.0),
    ],
)
def test_what_a_stage_adds_up(moved, rates, forward, backward):
    rates = Rates(**{"read": 1e9, "write": 1e9} | rates)
    seconds = {"forward_seconds": 1.0, "backward_seconds": 2.0, "update_seconds": 0.5}
    predicted = predict_step(rates, **seconds, **moved)
    assert [stage.seconds for stage in predicted.stages] == pytest.approx([forward, backward])


seconds = st.floats(0.0, 100.0)
sizes = st.floats(0.0, 1e12)


@given(seconds, seconds, sizes, sizes, sizes, st.booleans())
def test_a_stage_is_never_faster_than_any_part_of_it_alone(
    forward, update, read, written, activations, shared
):
    predicted = predict_step(
        Rates(2e9, 3e9, link=10e9, shared_cores=shared),
        forward_seconds=forward,
        backward_seconds=2 * forward,
        update_seconds=update,
        states_read_bytes=read,
        states_written_bytes=written,
        activations_bytes=activations,
    )
    parts = predicted.resource_seconds
    of_forward = max(time for name, time in parts.items() if name.startswith("forward"))
    assert predicted.stage("forward").seconds == of_forward
    of_backward = (parts[name] for name in ("backward computation", "update", "backward link"))
    assert predicted.stage("backward").seconds >= max(*of_backward, (read + activations) / 2e9)
    # Nor slower than one thing after the other.
    assert predicted.seconds <= sum(parts.values()) * (1 + 1e-9)
