"""Pipeline schedules of torch.distributed.pipelining over two processes, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.integrations.pipelining import follow_schedule
from tests.distributed.ranks import run_ranks
from tests.integrations.pipeline_runs import RANKS, SCHEDULES, STEPS

FOLLOWED = ("GPipe", "1F1B", "interleaved 1F1B")

Runs = dict[str, Any]


def runs_of(ranks: list[Runs], name: str, way: str) -> Iterator[tuple[Runs, Runs]]:
    for found in ranks:
        yield found[name][way]["offloaded"], found[name][way]["plain"]


# One test for what the processes did: pytest-xdist would run them again for others.
def test_every_schedule_trains_the_same_and_updates_early_where_it_may(tmp_path: Path) -> None:
    run_ranks("tests.integrations.pipeline_runs:every_schedule", tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for name, (_, stages, ways) in SCHEDULES.items():
        for way in ways:
            identical(ranks, name, way)
            moved_and_nothing_is_left(ranks, name, way)
        if name in FOLLOWED:
            # That gradients are divided is learned from the first step, and trusted three later.
            assert ahead(ranks, name, "commit") == [(3 * stages, stages)] * RANKS
            order_is_learned(ranks, name)
    # Nobody tells which backward is the last: updates wait for the step.
    assert ahead(ranks, "1F1B", "told nothing") == [(0, 0)] * RANKS
    for found in ranks:
        assert "scale_grads=False" in found["refused"]["divided"]
        assert "overlap: commit" in found["refused"]["divided"]
        assert "optimizer for each stage" in found["refused"]["one optimizer"]


def identical(ranks: list[Runs], name: str, way: str) -> None:
    """Losses, gradients and parameters are."""
    losses = 0
    for offloaded, plain in runs_of(ranks, name, way):
        losses += len(plain["losses"])
        assert offloaded["losses"] == plain["losses"], (name, way)
        gradients = [] if way == "eager" else plain["gradients"]
        for key, expected in (("gradients", gradients), ("parameters", plain["parameters"])):
            assert len(offloaded[key]) == len(expected), (name, way)
            assert all(map(torch.equal, offloaded[key], expected)), (name, way, key)
        assert way == "eager" or len(gradients) == STEPS * len(plain["parameters"])
    assert losses > 0


def moved_and_nothing_is_left(ranks: list[Runs], name: str, way: str) -> None:
    for offloaded, _ in runs_of(ranks, name, way):
        for client in ("activations", "optimizer"):
            for verb in ("written", "read"):
                assert offloaded["metrics"][f"offload/{client}/{verb}_bytes"] > 0, (name, way)
        assert offloaded["tickets"] == 0, (name, way)


def ahead(ranks: list[Runs], name: str, way: str) -> list[tuple[float, float]]:
    """Steps of which something was updated during backward, and in vain, by rank."""
    return [
        (
            offloaded["metrics"]["offload/optimizer/speculated_steps"],
            offloaded["metrics"]["offload/optimizer/redone_steps"],
        )
        for offloaded, _ in runs_of(ranks, name, way)
    ]


def order_is_learned(ranks: list[Runs], name: str) -> None:
    first, last = (found[name]["commit"]["offloaded"]["missed"] for found in ranks)
    # Of a step, only what is asked for first of all was not fetched ahead of anything.
    assert first[-3:] == [1, 1, 1]
    # The last stage goes back at once after each forward: what it has just saved is asked for.
    most = 1 if name == "GPipe" else 4
    assert last[-3:] == [most] * 3


def test_what_is_no_schedule_is_refused() -> None:
    with OffloadEngine() as engine, pytest.raises(ConfigError, match=r"Schedule1F1B.*got Linear"):
        follow_schedule(engine, torch.nn.Linear(1, 1))
