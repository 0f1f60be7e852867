"""Slices of parameters: where they begin, their states, and training with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, Optimizer

from offload_strategy.optimizer.states.parameter_slices import (
    slice_parameter,
)
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.user_class.trial import is_elementwise
from tests.optimizer.custom_optimizers import twisted
from tests.optimizer.runs import EVERY_OVERLAP, Run, compare, snapshot
from tests.optimizer.test_exactness import OPTIMIZERS
from tests.training import in_turn

SHAPES = [(1000,), (64, 3), (7, 64), (33, 5, 2), (129,), (1, 4096), (130, 1), (64,)]


@pytest.mark.parametrize("limit", [1, 64, 100, 640, 10_000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_cover_the_parameter_and_begin_at_multiples_of_64_elements(
    shape: tuple[int, ...], limit: int
) -> None:
    parameter = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    slices = slice_parameter(parameter, limit)
    assert torch.equal(torch.cat([param_slice.values for param_slice in slices]), parameter)
    assert all(param_slice.values.storage_offset() % 64 == 0 for param_slice in slices)
    assert all(param_slice.numel == param_slice.values.numel() > 0 for param_slice in slices)
    if parameter.numel() <= limit:
        assert slices[0].rows is None
    # Never larger than asked for, unless no cut is possible within.
    unit = next(rows for rows in range(1, 65) if rows * parameter[0].numel() % 64 == 0)
    assert (
        max(param_slice.numel for param_slice in slices)
        <= max(limit, unit * parameter[0].numel()) * 2
    )


@pytest.mark.parametrize(
    "parameter", [torch.tensor(1.0), torch.zeros(300, 200).t(), torch.zeros(0, 3)], ids=str
)
def test_parameters_without_contiguous_rows_stay_whole(parameter: torch.Tensor) -> None:
    (param_slice,) = slice_parameter(parameter, 10)
    assert param_slice.rows is None
    assert param_slice.values is parameter


def _whole_norm(o: Any, g: Any, p: Any, s: Any) -> Any:
    """Scales by the norm of the whole tensor, as LARS and LAMB do."""
    return p.grad - p.grad / p.grad.norm()


def _odd_blocks(o: Any, g: Any, p: Any, s: Any) -> Any:
    """Leaves rows out whose place in the tensor matters."""
    left_out = p.grad.clone()
    left_out[:: 1 + len(p) % 7] = 0
    return left_out


def _projects_matrices(o: Any, g: Any, p: Any, s: Any) -> Any:
    """Updates everything but matrices by element, as GaLore does."""
    return p.grad.mean(0) if p.dim() == 2 else None


@pytest.mark.parametrize(
    ("make", "shapes", "fits"),
    [
        (Adafactor, [(3,)], False),
        (twisted(_whole_norm), [(3,)], False),
        (twisted(_odd_blocks), [(3,)], False),
        (twisted(_projects_matrices), [(400, 300), (50,)], False),
        (twisted(_projects_matrices), [(400,), (50,)], True),
    ],
)
def test_optimizers_that_are_not_elementwise_are_recognised(
    make: Callable[[Any], Optimizer], shapes: list[tuple[int, ...]], fits: bool
) -> None:
    optimizer = make([nn.Parameter(torch.randn(shape)) for shape in shapes])
    assert is_elementwise(optimizer, optimizer.param_groups[0], Precision()) is fits


class Wide(nn.Module):
    """Large tensors whose rows are no multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(331, 37)
        self.up = nn.Linear(37, 1000)
        self.down = nn.Linear(1000, 37, bias=False)
        self.out = nn.Linear(37, 331, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(331, (64,), generator=generator)
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(x)))
        return nn.functional.cross_entropy(self.out(x), tokens.roll(1))


ELEMENTWISE = [
    *("AdamW fused", "AdamW foreach", "AdamW per tensor", "NAdam", "Adamax foreach groups"),
    *("Adagrad", "Rprop", "SGD momentum fused", "RMSprop centered foreach", "ASGD"),
]


@pytest.mark.parametrize(("name", "overlap"), in_turn(ELEMENTWISE, EVERY_OVERLAP))
def test_sliced_parameters_train_to_the_same_bits(name: str, overlap: str, disk: Path) -> None:
    def script(run: Run) -> None:
        run.model = Wide()  # type: ignore[assignment]
        run.optimizer = run.wrap(OPTIMIZERS[name](run.model))
        for step in range(5):
            run.optimizer.zero_grad()
            loss = run.model(step)
            loss.backward()
            run.optimizer.step()
            run.note(loss)
        saved = run.optimizer.state_dict()
        for index, state in saved["state"].items():
            for key, value in state.items():
                run.history[-1][f"saved.{index}.{key}"] = torch.as_tensor(value).clone()
        run.optimizer.load_state_dict(copy.deepcopy(saved))
        run.optimizer.zero_grad()
        run.model(6).backward()
        run.optimizer.step()
        run.note()
        other = Wide()  # a plain optimizer goes on with them as well
        plain = OPTIMIZERS[name](other)
        plain.load_state_dict(saved)
        other(7).backward()
        plain.step()
        run.history.append(snapshot(other))
        if run.engine is not None:
            (optimizer,) = run.engine._optimizers
            assert sum(p.rows is not None for s in optimizer._subgroups for p in s.slices) > 20

    compare(script, None, disk, overlap, subgroup_size=3000)
