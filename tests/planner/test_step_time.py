"""Fuyou's equations against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_strategy.planner.step_time import Rates, StepProfile, predict_step

# GPT-3 13B as the paper trains it: fp16 weights and gradients, 12 bytes of states a parameter, six
# SSDs of 6 GB/s in all directions, a link of 20 GB/s.
P = 13e9
GPT3_13B = StepProfile(
    forward_seconds=2.0,
    update_seconds=5.0,
    weights_bytes=2 * P,
    gradients_bytes=2 * P,
    states_read_bytes=12 * P,
    states_written_bytes=12 * P,
    activations_bytes=40e9,
)
SIX_SSDS = Rates(read=6e9, write=6e9, paths=6, link=20e9)


def test_the_equations_by_hand():
    predicted = predict_step(GPT3_13B, SIX_SSDS)
    # Forward: 26 GB of weights are read and 40 GB of activations written at 36 GB/s (eq. 4);
    # over the link 40 GB at 20 GB/s (eq. 3).
    assert predicted.resource_seconds["forward paths"] == pytest.approx(66 / 36)
    assert predicted.resource_seconds["forward link"] == pytest.approx(2.0)
    assert predicted.stage("forward").seconds == pytest.approx(2.0)
    # Backward: 156 + 26 + 40 GB read, 156 + 26 GB written (eq. 7); over the link 26 + 40 GB (6).
    assert predicted.resource_seconds["backward paths"] == pytest.approx((222 + 182) / 36)
    assert predicted.resource_seconds["backward link"] == pytest.approx(66 / 20)
    assert predicted.resource_seconds["backward computation"] == pytest.approx(4.0)
    assert predicted.stage("backward").seconds == pytest.approx(404 / 36)
    assert predicted.seconds == pytest.approx(2.0 + 404 / 36)


def test_with_twice_as_many_paths_the_paths_take_half_the_time():
    twice = Rates(read=6e9, write=6e9, paths=12, link=20e9)
    once = predict_step(GPT3_13B, SIX_SSDS).resource_seconds
    assert predict_step(GPT3_13B, twice).resource_seconds["backward paths"] == pytest.approx(
        once["backward paths"] / 2
    )


def test_recomputation_counts_as_backward_computation():
    profile = StepProfile(forward_seconds=1.0, update_seconds=0.5, recompute_seconds=0.75)
    assert predict_step(profile, Rates(1e9, 1e9)).stage("backward").seconds == pytest.approx(2.75)


def test_a_measured_backward_is_taken_as_it_is():
    profile = StepProfile(forward_seconds=1.0, update_seconds=0.5, backward_seconds=1.4)
    assert predict_step(profile, Rates(1e9, 1e9)).seconds == pytest.approx(2.4)


def test_on_shared_cores_the_update_is_added_to_backward_and_still_hides_behind_the_paths():
    computing = StepProfile(forward_seconds=1.0, update_seconds=0.5)
    assert predict_step(computing, Rates(1e9, 1e9)).stage("backward").seconds == pytest.approx(2.0)
    shared = Rates(1e9, 1e9, shared_cores=True)
    assert predict_step(computing, shared).stage("backward").seconds == pytest.approx(2.5)
    moving = StepProfile(1.0, 0.5, states_read_bytes=3e9, states_written_bytes=1e9)
    assert predict_step(moving, shared).stage("backward").seconds == pytest.approx(4.0)


def test_on_shared_cores_what_moves_takes_its_toll():
    profile = StepProfile(
        1.0, 0.5, states_read_bytes=3e9, states_written_bytes=1e9, activations_bytes=2e9
    )
    fast = Rates(1e12, 1e12, shared_cores=True, io_overhead=1e-10)
    predicted = predict_step(profile, fast)
    assert predicted.stage("forward").seconds == pytest.approx(1.2)
    assert predicted.stage("backward").seconds == pytest.approx(2.0 + 0.5 + 0.6)
    beside = predict_step(profile, Rates(1e12, 1e12, io_overhead=1e-10))
    assert (beside.stage("forward").seconds, beside.stage("backward").seconds) == pytest.approx(
        (1.0, 2.0)
    )


def test_a_model_on_the_host_has_no_link_to_wait_for():
    profile = StepProfile(1.0, 0.1, gradients_bytes=1e15)
    assert (
        predict_step(profile, Rates(1e9, 1e9, link=math.inf)).resource_seconds["backward link"]
        == 0.0
    )


seconds = st.floats(0.0, 100.0)
sizes = st.floats(0.0, 1e12)


@given(seconds, seconds, sizes, sizes, sizes, st.booleans())
def test_a_stage_is_never_faster_than_any_part_of_it_alone(
    forward, update, read, written, activations, shared
):
    profile = StepProfile(
        forward,
        update,
        states_read_bytes=read,
        states_written_bytes=written,
        activations_bytes=activations,
    )
    rates = Rates(2e9, 3e9, link=10e9, shared_cores=shared)
    predicted = predict_step(profile, rates)
    parts = predicted.resource_seconds
    assert predicted.stage("forward").seconds == max(
        v for k, v in parts.items() if k.startswith("forward")
    )
    assert predicted.stage("backward").seconds >= max(
        parts["backward computation"], parts["update"], parts["backward link"]
    )
    assert predicted.stage("backward").seconds >= (read + activations) / 2e9
    # Nor slower than one thing after the other.
    assert predicted.seconds <= sum(parts.values()) * (1 + 1e-9)
