"""Pipeline schedules of torch.distributed.pipelining over two processes, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.integrations.pipelining import follow_schedule
from tests.integrations.pipeline_runs import RANKS, SCHEDULES, STEPS
from tests.integrations.support import environment

CASES = [(name, way) for name, (_, _, ways) in SCHEDULES.items() for way in ways]
SECONDS = 120

Runs = dict[str, Any]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """What the processes found, by rank; both are started once, and train in every way."""
    directory = tmp_path_factory.mktemp("pipelines")
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.pipeline_runs"]
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(directory)],
            cwd=root,
            env=environment(directory, GLOO_SOCKET_IFNAME="lo"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, said, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def runs_of(ranks: list[Runs], name: str, way: str) -> Iterator[tuple[Runs, Runs]]:
    for found in ranks:
        yield found[name][way]["offloaded"], found[name][way]["plain"]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_losses_gradients_and_parameters_are_identical(
    ranks: list[Runs], name: str, way: str
) -> None:
    losses = 0
    for offloaded, plain in runs_of(ranks, name, way):
        losses += len(plain["losses"])
        assert offloaded["losses"] == plain["losses"]
        gradients = [] if way == "eager" else plain["gradients"]
        for key, expected in (("gradients", gradients), ("parameters", plain["parameters"])):
            assert len(offloaded[key]) == len(expected)
            assert all(map(torch.equal, offloaded[key], expected)), key
        assert way == "eager" or len(gradients) == STEPS * len(plain["parameters"])
    assert losses > 0


@pytest.mark.parametrize(("name", "way"), CASES)
def test_activations_and_states_moved_and_nothing_is_left(
    ranks: list[Runs], name: str, way: str
) -> None:
    for offloaded, _ in runs_of(ranks, name, way):
        for client in ("activations", "optimizer"):
            assert offloaded["metrics"][f"offload/{client}/written_bytes"] > 0
            assert offloaded["metrics"][f"offload/{client}/read_bytes"] > 0
        assert offloaded["tickets"] == 0


def ahead(ranks: list[Runs], name: str, way: str) -> list[tuple[float, float]]:
    """Steps of which something was updated during backward, and in vain, by rank."""
    return [
        (
            offloaded["metrics"]["offload/optimizer/speculated_steps"],
            offloaded["metrics"]["offload/optimizer/redone_steps"],
        )
        for offloaded, _ in runs_of(ranks, name, way)
    ]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "interleaved 1F1B"])
def test_updates_run_ahead_when_the_engine_follows_the_schedule(
    ranks: list[Runs], name: str
) -> None:
    # That gradients are divided is learned from the first step, and trusted after three more.
    stages = SCHEDULES[name][1]
    assert ahead(ranks, name, "commit") == [(3 * stages, stages)] * RANKS


def test_updates_wait_for_the_step_when_nobody_tells_which_backward_is_the_last(
    ranks: list[Runs],
) -> None:
    assert ahead(ranks, "1F1B", "told nothing") == [(0, 0)] * RANKS


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "interleaved 1F1B"])
def test_the_order_of_the_schedule_is_learned(ranks: list[Runs], name: str) -> None:
    first, last = (found[name]["commit"]["offloaded"]["missed"] for found in ranks)
    # Of a step, only what is asked for first of all was not fetched ahead of anything.
    assert first[-3:] == [1, 1, 1]
    # The last stage goes back at once after each forward: what it has just saved is asked for.
    most = 1 if name == "GPipe" else 4
    assert last[-3:] == [most] * 3


def test_what_eager_updates_would_get_wrong_is_refused(ranks: list[Runs]) -> None:
    for found in ranks:
        assert "scale_grads=False" in found["refused"]["divided"]
        assert "overlap: commit" in found["refused"]["divided"]
        assert "optimizer for each stage" in found["refused"]["one optimizer"]


def test_what_is_no_schedule_is_refused() -> None:
    with OffloadEngine() as engine, pytest.raises(ConfigError, match=r"Schedule1F1B.*got Linear"):
        follow_schedule(engine, torch.nn.Linear(1, 1))
