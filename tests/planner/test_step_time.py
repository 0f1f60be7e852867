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


@pytest.mark.parametrize("paths", [6, 12])
def test_the_equations_by_hand(paths):
    predicted = predict_step(GPT3_13B, Rates(read=6e9, write=6e9, paths=paths, link=20e9))
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
    ("profile", "rates", "forward", "backward"),
    [
        # Recomputation counts as backward; a measured backward is taken as it is.
        ({"recompute_seconds": 0.75}, {}, 1.0, 2.75),
        ({"backward_seconds": 1.4}, {}, 1.0, 1.4),
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
def test_what_a_stage_adds_up(profile, rates, forward, backward):
    rates = Rates(**{"read": 1e9, "write": 1e9} | rates)
    predicted = predict_step(StepProfile(1.0, 0.5, **profile), rates)
    assert [stage.seconds for stage in predicted.stages] == pytest.approx([forward, backward])


seconds = st.floats(0.0, 100.0)
sizes = st.floats(0.0, 1e12)


@given(seconds, seconds, sizes, sizes, sizes, st.booleans())
def test_a_stage_is_never_faster_than_any_part_of_it_alone(
    forward, update, read, written, activations, shared
):
    moved = {"states_read_bytes": read, "states_written_bytes": written}
    profile = StepProfile(forward, update, activations_bytes=activations, **moved)
    predicted = predict_step(profile, Rates(2e9, 3e9, link=10e9, shared_cores=shared))
    parts = predicted.resource_seconds
    of_forward = max(time for name, time in parts.items() if name.startswith("forward"))
    assert predicted.stage("forward").seconds == of_forward
    of_backward = (parts[name] for name in ("backward computation", "update", "backward link"))
    assert predicted.stage("backward").seconds >= max(*of_backward, (read + activations) / 2e9)
    # Nor slower than one thing after the other.
    assert predicted.seconds <= sum(parts.values()) * (1 + 1e-9)
