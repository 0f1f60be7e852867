"""Recorded edits: which are equal, and which count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offload_strategy.optimizer.gradients.recorded_edits import UNSCALE, Edit, EditHistory
from tests.optimizer.gradients.pairs import DTYPES, assert_same, gradient

aten = torch.ops.aten
MUL = aten.mul_.Tensor
Arguments = tuple[Any, ...]


def edit(op: Any, *arguments: Any, dtype: torch.dtype = torch.float32) -> Edit:
    return Edit.of(op, arguments, dtype, torch.device("cpu"))


def history(*edits: Arguments) -> EditHistory:
    return EditHistory(tuple(edit(*each) for each in edits))


EDITS: list[Arguments] = [
    (MUL, 0.3),
    (MUL, torch.tensor(0.3, dtype=torch.float16)),
    (MUL, torch.tensor(0.3)),
    (MUL, torch.tensor(0.3, dtype=torch.float64)),
    (MUL, 0.0),
    (MUL, -0.0),
    (MUL, 2),
    (MUL, 2.0),
    (MUL, math.nan),
    (MUL, math.nextafter(1.0, 2.0)),
    (MUL, torch.tensor(math.nextafter(1.0, 2.0), dtype=torch.float64)),
    (aten.div_.Tensor, 0.3),
    (aten._foreach_mul_.Scalar, 0.3),
    (aten._foreach_mul_.ScalarList, 0.3),
    (aten._foreach_mul_.Tensor, torch.tensor(0.3)),
    (aten._foreach_div_.Scalar, 0.3),
    (aten.clamp_.default, -1.0, 1.0),
    (aten.clamp_.default, None, 1.0),
    (aten._foreach_clamp_min_.Scalar, -0.5),
    (UNSCALE, torch.tensor(0.3)),
]
IDENTITIES: list[Arguments] = [
    (MUL, 1),
    (MUL, 1.0),
    (MUL, torch.tensor(1.0)),
    (aten.div_.Tensor, 1.0),
    (aten._foreach_mul_.Tensor, torch.tensor(1.0)),
    (UNSCALE, torch.tensor([1.0])),
]


def test_an_edit_equals_only_itself() -> None:
    for index, mine in enumerate(EDITS):
        assert history(mine)
        assert history(mine) != "something else"
        for other_index, other in enumerate(EDITS):
            assert (history(mine) == history(other)) == (index == other_index), (mine, other)
        assert hash(history(mine)) == hash(history(mine))


def test_order_and_number_of_edits_count() -> None:
    one, other = EDITS[0], EDITS[-4]
    assert history(one, other) != history(other, one)
    assert history(one) != history(one, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edits_that_change_nothing_do_not_count(dtype: torch.dtype) -> None:
    for identity in IDENTITIES:
        assert not history(identity)
        assert history(EDITS[0], identity) == history(EDITS[0])
        assert hash(history(identity)) == hash(EditHistory())
        # And they do not: neither zeros nor subnormal numbers.
        before = gradient(dtype)
        before.view(-1)[6:8] = torch.tensor([torch.inf, -torch.inf])
        after = before.clone()
        edit(*identity).apply_(after)
        assert_same(after, before)


def test_where_subnormal_numbers_are_flushed_times_one_counts() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        flushing = history((MUL, 1.0))
    finally:
        torch.set_flush_denormal(False)
    assert flushing


def test_arguments_are_those_of_the_time() -> None:
    factor = torch.tensor(0.5)
    recorded = history((MUL, factor))
    factor.fill_(3.0)
    assert recorded.apply_(torch.ones(4)).tolist() == [0.5] * 4
    assert recorded == history((MUL, torch.tensor(0.5)))


@pytest.mark.parametrize("limits", [(1e300, None), (None, None)])
def test_what_pytorch_refuses_is_refused_when_it_is_recorded(limits: Arguments) -> None:
    with pytest.raises(RuntimeError):
        edit(aten.clamp_.default, *limits, dtype=torch.float16)
