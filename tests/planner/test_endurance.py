"""SSDTrain's section III-D: required bandwidth, and how long drives last."""

from __future__ import annotations

import math

import pytest

from offload_strategy.errors import ConfigError
from offload_strategy.planner.endurance import (
    AS_RATED,
    SECONDS_PER_YEAR,
    SSDTRAIN,
    Wear,
    bytes_per_day,
    lifespan_seconds,
    required_write_rate,
)
from tests.planner.paper_tables import FOUR_980, MEGATRON_RUNS


@pytest.mark.parametrize("case", MEGATRON_RUNS)
def test_megatrons_steps_take_as_many_days_as_its_table_says(case):
    # 300 billion tokens, which the table gives in whole days.
    steps = 300e9 / (case.sequences * 2048)
    assert steps * case.step_seconds / 86400 == pytest.approx(case.days, rel=0.015)


@pytest.mark.parametrize("case", MEGATRON_RUNS)
@pytest.mark.parametrize("recomputes", [True, False], ids=["as-measured", "without-recomputing"])
def test_megatrons_runs_stay_within_ssdtrains_bounds(case, recomputes):
    # A step that moves activations need not compute them again: it takes 3/4 of the measured one.
    step = case.step_seconds * (1 if recomputes else 3 / 4)
    assert required_write_rate(case.activation_bytes(), step) <= 12.1e9
    years = lifespan_seconds(FOUR_980.endurance_bytes, step, case.activation_bytes(), SSDTRAIN)
    assert years / SECONDS_PER_YEAR > 2


def test_the_largest_required_rate_is_near_ssdtrains():
    # 11.4 GB/s against "no greater than 12.1".
    rates = [
        required_write_rate(c.activation_bytes(), 0.75 * c.step_seconds) for c in MEGATRON_RUNS
    ]
    assert 10.5e9 < max(rates) <= 12.1e9


def test_larger_systems_need_less_and_their_drives_live_longer():
    for rows in (MEGATRON_RUNS[0:3], MEGATRON_RUNS[3:6], MEGATRON_RUNS[6:9], MEGATRON_RUNS[9:12]):
        rates = [required_write_rate(c.activation_bytes(), c.step_seconds) for c in rows]
        assert rates == sorted(rates, reverse=True)
        lives = [
            lifespan_seconds(FOUR_980.endurance_bytes, c.step_seconds, c.activation_bytes())
            for c in rows
        ]
        assert lives == sorted(lives)


def test_without_sequence_parallelism_tensor_parallel_runs_would_be_beyond_the_bounds():
    # So the bounds hold for the rows of tensor parallelism only if it divides the norms as well,
    # which the runs of 2021 did not.
    rate = required_write_rate(
        MEGATRON_RUNS[6].activation_bytes(False), MEGATRON_RUNS[6].step_seconds
    )
    assert rate > 2 * 12.1e9


def test_without_what_is_assumed_the_drives_would_last_weeks():
    case = MEGATRON_RUNS[0]
    rated = lifespan_seconds(FOUR_980.endurance_bytes, case.step_seconds, case.activation_bytes())
    assert rated / 86400 < 14
    assumed = lifespan_seconds(
        FOUR_980.endurance_bytes, case.step_seconds, case.activation_bytes(), SSDTRAIN
    )
    assert assumed == pytest.approx(2.5 * 86 * rated)


def test_the_formula_by_hand():
    # 600 TBW, 100 GB in a step of 10 s: 6,000 steps.
    assert lifespan_seconds(600e12, 10, 100e9) == pytest.approx(60_000)
    assert lifespan_seconds(600e12, 10, 100e9, Wear(2.5, 2.0, 3.0)) == pytest.approx(225_000)
    assert lifespan_seconds(600e12, 10, 0, AS_RATED) == math.inf
    assert bytes_per_day(100e9, 10) == pytest.approx(864e12)
    assert required_write_rate(100e9, 10) == pytest.approx(20e9)


def test_nonsense_is_refused():
    with pytest.raises(ConfigError, match="wear: amplification is 0"):
        Wear(amplification=0)
    with pytest.raises(ConfigError, match="step_seconds is 0"):
        required_write_rate(1, 0)
    with pytest.raises(ConfigError, match="endurance_bytes is -1"):
        lifespan_seconds(-1, 1, 1)
