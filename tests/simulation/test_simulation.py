"""Thousands of orders in which a store's events may come: the right bytes, and nothing left.

``make simulate`` runs 10,000 seeds, and ``make simulate SEED=n`` one of them again.
"""

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import AdamW

from offload_strategy import OffloadEngine
from offload_strategy.engine import resources
from offload_strategy.store import writer
from tests import training
from tests.conformance.selection import commits
from tests.optimizer.runs import loss_of, make_net
from tests.simulation.clients import simulate
from tests.simulation.disks import SimulatedRegion, SimulatedSystem
from tests.simulation.scheduler import Shim
from tests.simulation.world import scheduled, tiny_world

#: Worlds, and training runs, of one run of all tests; the next commit has others.
_WORLDS, _TRAININGS = 300, 10


@pytest.fixture(scope="module", autouse=True)
def _tiny():
    with tiny_world():
        yield


def seeds(usual, share=1):
    if (seed := os.environ.get("SEED")) is not None:
        return range(int(seed), int(seed) + 1)
    if (count := os.environ.get("SEEDS")) is not None:
        return range(int(count) // share)
    return range(commits() * usual, (commits() + 1) * usual)


def test_every_seed_ends_with_the_right_bytes_and_nothing_left():
    for seed in seeds(_WORLDS):
        try:
            simulate(Random(seed))
        except AssertionError as error:
            pytest.fail(f"make simulate SEED={seed}\n{error}", pytrace=False)


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_shortest_order_of_events_that_fails(random):
    simulate(random, steps=15)


@pytest.mark.parametrize("number", range(3))
def test_a_seed_gives_the_same_run_again(number):
    assert simulate(Random(number)) == simulate(Random(number))


def train(engine):
    model = make_net()
    optimizer = training.attached(engine, model, AdamW(model.parameters(), 1e-2))
    for number in range(3):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return training.weights(model)


def _region(path, *_, **__):
    """A region with delays, and with faults that are repaired."""
    choose = Shim.scheduler.random.choice
    made = SimulatedRegion(Shim.scheduler.system, 4 << 20, path)
    made.disk.seconds = choose(((0.0,), (0.0, 0.001), (0.0001, 0.05)))
    made.disk.faults = [choose(("again", "short")) for _ in range(3)]
    return made


def test_training_has_the_same_weights_with_every_seed(disk, monkeypatch):
    monkeypatch.setattr(writer, "_WORTH_BYTES", 1 << 30)  # the addresses of tensors are chance
    expected = train(None)
    for seed in seeds(_TRAININGS, share=50):
        random = Random(seed)
        monkeypatch.setattr(resources, "Region", _region)
        overlap = {"overlap": random.choice(("commit", "eager", "off"))}
        config = training.settings(disk, random.choice((None, "16KiB")), optimizer=overlap)
        with scheduled(random, [f"make simulate SEED={seed}"]) as scheduler:
            scheduler.system = SimulatedSystem(scheduler)
            with OffloadEngine(config) as engine:
                training.assert_same_bits(train(engine), expected)
