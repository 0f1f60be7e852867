"""State dicts and states are those of the plain optimizer, both ways."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.optimizer.runs import (
    OVERLAPS,
    Run,
    adamw,
    assert_same_state_dict,
    offloading,
    steps,
)
from tests.training import assert_same_bits, in_turn

# ---------------------------------------------------------------------- state dicts
MAKE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": adamw,
    "Adam amsgrad": lambda m: Adam(m.parameters(), 1e-2, amsgrad=True),
    "SGD momentum": lambda m: SGD(m.parameters(), 0.1, momentum=0.9),
    "SGD": lambda m: SGD(m.parameters(), 0.1),
    "named groups": lambda m: AdamW(
        [
            {"params": list(m.named_parameters())[:3], "lr": 0.1},
            {"params": list(m.named_parameters())[3:]},
        ],
        1e-2,
    ),
}


def test_a_state_dict_is_a_copy(disk: Path) -> None:
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 1)
        saved = run.optimizer.state_dict()
        kept = copy.deepcopy(saved)
        for state in saved["state"].values():
            state["exp_avg"].zero_()
        assert_same_state_dict(run.optimizer.state_dict(), kept)
        kept["state"][170] = {"exp_avg": torch.ones(3)}  # of an unknown parameter: it is kept
        run.optimizer.load_state_dict(copy.deepcopy(kept))
        kept_for_good = run.optimizer.state_dict()
        assert torch.equal(kept_for_good["state"][170]["exp_avg"], torch.ones(3))
        kept = copy.deepcopy(kept_for_good)
        steps(run, 2, start=1)
    assert_same_state_dict(kept_for_good, kept)  # also after the engine is closed


@pytest.mark.parametrize(
    ("overlap", "name", "pending", "through_a_file"),
    in_turn(OVERLAPS * 3, list(MAKE), [False, True, True], [True, True, False, False]),
)
def test_checkpoints_go_both_ways(
    name: str, overlap: str, pending: bool, through_a_file: bool, disk: Path
) -> None:
    """Plain, offloaded, and changing over in the middle: all the same."""

    def handed_over(run: Run, engine: Any) -> Run:
        state: Any = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        if through_a_file:
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        else:
            state = copy.deepcopy(state)
        other = Run(MAKE[name], engine)
        if pending:  # what ran ahead must not survive the loading
            other.backward(77)
        other.model.load_state_dict(state["model"])
        other.optimizer.load_state_dict(state["optimizer"])
        other.model.zero_grad()
        return other

    plain = Run(MAKE[name])
    fresh = plain.optimizer.state_dict()
    steps(plain, 6)
    with offloading(disk, overlap) as engine:
        assert_same_state_dict(Run(MAKE[name], engine).optimizer.state_dict(), fresh)
        run = Run(MAKE[name])
        steps(run, 2)
        run = handed_over(run, engine)
        steps(run, 2, start=2)
        run = handed_over(run, None)
        steps(run, 1, start=4)
        run.optimizer = engine.attach(None, run.optimizer)  # with the states that it has
        steps(run, 1, start=5)
        assert_same_bits(run.history[-1], plain.history[-1])
        assert_same_state_dict(run.optimizer.state_dict(), plain.optimizer.state_dict())


def test_loading_a_state_dict_of_another_model_is_refused_and_changes_nothing(
    disk: Path,
) -> None:
    other = AdamW(nn.Linear(2, 2).parameters())
    with offloading(disk) as engine:
        run = Run(adamw, engine)
        steps(run, 2)
        before = run.optimizer.state_dict()
        with pytest.raises(ValueError, match="doesn't match"):
            run.optimizer.load_state_dict(other.state_dict())
        assert_same_state_dict(run.optimizer.state_dict(), before)


# ---------------------------------------------------------------------- optimizer.state
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_state_reads_like_a_dictionary(overlap: str, disk: Path) -> None:
    plain = Run(adamw)
    with offloading(disk, overlap) as engine:
        run = Run(adamw, engine)
        assert not run.optimizer.state
        steps(plain, 2)
        steps(run, 2)
        names = {parameter: name for name, parameter in run.model.named_parameters()}
        states, expected = run.optimizer.state, plain.optimizer.state
        assert len(states) == len(expected)
        for parameter, name in names.items():
            twin = plain.model.get_parameter(name)
            assert (parameter in states) == (twin in expected)
            assert_same_state_dict(dict(states[parameter]), dict(expected.get(twin, {})))
        assert {names[p] for p, _ in states.items()} == {names[p] for p in states}
        assert "anything" not in states
