"""Thousands of orders in which a store's events may come: no bytes are lost, and nothing is left.

``make simulate`` runs 10,000 seeds, and ``make simulate SEED=n`` one of them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.selection import commits
from tests.simulation.world import simulate, tiny_world

#: Seeds of a run of all tests, of which there are others with each commit.
_USUAL = 300


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    with tiny_world():
        yield


def seeds() -> range:
    if (seed := os.environ.get("SEED")) is not None:
        return range(int(seed), int(seed) + 1)
    if (count := os.environ.get("SEEDS")) is not None:
        return range(int(count))
    return range(commits() * _USUAL, (commits() + 1) * _USUAL)


def test_every_seed_ends_with_the_right_bytes_and_nothing_left() -> None:
    for seed in seeds():
        try:
            simulate(Random(seed))
        except AssertionError as error:
            pytest.fail(f"make simulate SEED={seed}\n{error}", pytrace=False)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_shortest_order_of_events_that_fails(random: Random) -> None:
    simulate(random, steps=15)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_the_same_run_again(seed: int) -> None:
    first, second = simulate(Random(seed)), simulate(Random(seed))
    assert (first.log, first.scheduler.steps) == (second.log, second.scheduler.steps)
    assert first.scheduler.now == second.scheduler.now
