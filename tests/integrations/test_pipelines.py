"""Pipeline schedules of torch.distributed.pipelining over two processes, to the last bit."""

from __future__ import annotations

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


# One test for what the processes did: pytest-xdist would run them again for others.
def test_every_schedule_trains_the_same_and_updates_early_where_it_may(tmp_path: Path) -> None:
    run_ranks("tests.integrations.pipeline_runs:every_schedule", tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for name, (_, stages, ways) in SCHEDULES.items():
        for way in ways:
            runs = [rank[name][way] for rank in ranks]
            assert sum(len(run["plain"]["losses"]) for run in runs) > 0
            for run in runs:
                identical(run["offloaded"], run["plain"], (name, way))
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


def identical(offloaded: Runs, plain: Runs, told: tuple[str, str]) -> None:
    """Losses, gradients and parameters are; bytes have moved, and nothing is left."""
    is_eager = told[1] == "eager"
    assert offloaded["losses"] == plain["losses"], told
    gradients = [] if is_eager else plain["gradients"]
    for key, expected in (("gradients", gradients), ("parameters", plain["parameters"])):
        assert len(offloaded[key]) == len(expected), told
        assert all(map(torch.equal, offloaded[key], expected)), (told, key)
    assert is_eager or len(gradients) == STEPS * len(plain["parameters"])
    for client in ("activations", "optimizer"):
        for verb in ("written", "read"):
            assert offloaded["metrics"][f"offload/{client}/{verb}_bytes"] > 0, told
    assert offloaded["tickets"] == 0, told


def ahead(ranks: list[Runs], name: str, way: str) -> list[tuple[float, ...]]:
    """Steps of which something was updated during backward, and in vain, by rank."""
    metrics = [rank[name][way]["offloaded"]["metrics"] for rank in ranks]
    verbs = ("speculated", "redone")
    return [tuple(of[f"offload/optimizer/{verb}_steps"] for verb in verbs) for of in metrics]


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
