"""Bytes required from moment to moment."""

from __future__ import annotations

import random

import pytest

from offload_strategy.plan_runtime.memory_curve import MemoryCurve
from offload_strategy.plan_runtime.profile import TensorLife, peak_of
from tests.plan_runtime.profiles import stack


def test_a_stack_is_highest_where_backward_begins() -> None:
    profile = stack(4)
    pressure = MemoryCurve(profile.tensors, profile.step_seconds, ((0.0, 50),))
    assert pressure.peak_bytes == 450
    assert peak_of(profile.tensors, profile.step_seconds) == 400
    assert pressure.most(0.0, 1.5) == 150


def test_relief_counts_only_what_is_above_the_limit() -> None:
    profile = stack(2)  # 100 from 1 s, 200 from 2 s to 4 s, 100 to 6 s
    pressure = MemoryCurve(profile.tensors, profile.step_seconds)
    assert pressure.relief(1.0, 6.0, 100, limit=150) == pytest.approx(50 * 2)
    assert pressure.relief(1.0, 6.0, 30, limit=150) == pytest.approx(30 * 2)
    assert pressure.relief(3.0, 6.0, 100, limit=0) == pytest.approx(100 * 3)
    assert pressure.relief(0.0, 1.0, 100, limit=0) == 0


def test_a_period_beyond_the_end_relieves_the_next_steps_beginning() -> None:
    weight = TensorLife("weight", 100, (2.0, 5.0), cyclic=True)
    pressure = MemoryCurve((weight,), 10.0)
    assert pressure.relief(6.0, 11.0, 100, limit=0) == pytest.approx(500)
    pressure.add(6.0, 11.0, -100)
    assert pressure.most(0.0, 1.0) == 0
    assert pressure.most(1.0, 6.0) == 100
    assert pressure.most(6.0, 10.0) == 0
    assert pressure.most(8.0, 11.5) == 100


def test_since_when_there_is_room() -> None:
    profile = stack(2)
    pressure = MemoryCurve(profile.tensors, profile.step_seconds)
    assert pressure.since(1.0, 6.0, 100) == 4.0
    assert pressure.since(1.0, 6.0, 50) == 6.0
    assert pressure.since(1.0, 6.0, 500) == 1.0


def test_levels_are_those_of_adding_up_moment_by_moment() -> None:
    chance = random.Random(1)
    for _ in range(100):
        spans = [
            (chance.uniform(0, 10), chance.uniform(0, 10), chance.randint(1, 9)) for _ in range(8)
        ]
        pressure = MemoryCurve((), 10.0)
        for begin, length, nbytes in spans:
            pressure.add(begin, begin + length, nbytes)
        for _ in range(20):
            moment = chance.uniform(0, 10)
            wanted = sum(
                nbytes
                for begin, length, nbytes in spans
                if begin <= moment < begin + length or begin <= moment + 10 < begin + length
            )
            assert pressure.most(moment, moment + 1e-9) == wanted
