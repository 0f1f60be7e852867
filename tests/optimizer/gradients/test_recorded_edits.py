"""Recorded edits: which are equal. `test_offloaded_gradient` applies them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offload_strategy.optimizer.gradients.recorded_edits import UNSCALE, Edit, EditHistory
from tests.optimizer.gradients.pairs import DTYPES, assert_same, gradient

aten = torch.ops.aten
CPU = torch.device("cpu")


def edit(op: Any, *arguments: Any, dtype: torch.dtype = torch.float32) -> Edit:
    return Edit.of(op, arguments, dtype, CPU)


def history(*edits: Edit) -> EditHistory:
    return EditHistory(edits)


EDITS: dict[str, Any] = {
    "times a number": lambda: edit(aten.mul_.Tensor, 0.3),
    "times the same in half precision": lambda: edit(
        aten.mul_.Tensor, torch.tensor(0.3, dtype=torch.float16)
    ),
    "times a tensor": lambda: edit(aten.mul_.Tensor, torch.tensor(0.3)),
    "times a double": lambda: edit(aten.mul_.Tensor, torch.tensor(0.3, dtype=torch.float64)),
    "times zero": lambda: edit(aten.mul_.Tensor, 0.0),
    "times minus zero": lambda: edit(aten.mul_.Tensor, -0.0),
    "times two": lambda: edit(aten.mul_.Tensor, 2),
    "times two as a float": lambda: edit(aten.mul_.Tensor, 2.0),
    "by a number": lambda: edit(aten.div_.Tensor, 0.3),
    "as one of a list": lambda: edit(aten._foreach_mul_.Scalar, 0.3),
    "as one of a list, by a number of its own": lambda: edit(aten._foreach_mul_.ScalarList, 0.3),
    "as one of a list, by a tensor": lambda: edit(aten._foreach_mul_.Tensor, torch.tensor(0.3)),
    "divided as one of a list": lambda: edit(aten._foreach_div_.Scalar, 0.3),
    "clamped": lambda: edit(aten.clamp_.default, -0.5, 0.5),
    "clamped above": lambda: edit(aten.clamp_.default, None, 0.5),
    "clamped below": lambda: edit(aten._foreach_clamp_min_.Scalar, -0.5),
    "unscaled": lambda: edit(UNSCALE, torch.tensor(0.3)),
    "times NaN": lambda: edit(aten.mul_.Tensor, math.nan),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_equals_only_itself(name: str) -> None:
    mine = history(EDITS[name]())
    for other in EDITS:
        again = history(EDITS[other]())
        assert (mine == again) == (name == other), other
        assert mine != again or hash(mine) == hash(again)
    assert mine
    assert mine != "something else"


def test_order_and_number_of_edits_count() -> None:
    one, other = EDITS["times a number"](), EDITS["clamped"]()
    assert history(one, other) != history(other, one)
    assert history(one) != history(one, one)
    assert {history(one): 1}[history(EDITS["times a number"]())] == 1


IDENTITIES: dict[str, Any] = {
    "times one": lambda: edit(aten.mul_.Tensor, 1),
    "times one as a float": lambda: edit(aten.mul_.Tensor, 1.0),
    "times a tensor of one": lambda: edit(aten.mul_.Tensor, torch.tensor(1.0)),
    "by one": lambda: edit(aten.div_.Tensor, 1.0),
    "a list times a tensor of one": lambda: edit(aten._foreach_mul_.Tensor, torch.tensor(1.0)),
    "unscaled by one": lambda: edit(UNSCALE, torch.tensor([1.0])),
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edits_that_change_nothing_do_not_count(name: str, dtype: torch.dtype) -> None:
    assert not history(IDENTITIES[name]())
    one = EDITS["times a number"]()
    assert history(one, IDENTITIES[name]()) == history(one)
    assert hash(history(IDENTITIES[name]())) == hash(EditHistory())
    # And they do not: neither zeros nor subnormal numbers.
    before = gradient(dtype)
    before.view(-1)[6:8] = torch.tensor([torch.inf, -torch.inf])
    after = before.clone()
    IDENTITIES[name]().apply_(after)
    assert_same(after, before)


def test_where_subnormal_numbers_are_flushed_times_one_counts() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        flushing = IDENTITIES["times one as a float"]()
    finally:
        torch.set_flush_denormal(False)
    assert history(flushing)
    assert history(flushing) == history(flushing)


def test_only_a_factor_of_exactly_one_changes_nothing() -> None:
    above = math.nextafter(1.0, 2.0)
    assert history(edit(aten.mul_.Tensor, above))
    assert history(edit(aten.mul_.Tensor, torch.tensor(above, dtype=torch.float64)))
    assert history(edit(aten.clamp_.default, -1.0, 1.0))
    assert history(edit(aten.clamp_.default, None, 1.0))


def test_arguments_are_those_of_the_time() -> None:
    factor = torch.tensor(0.5)
    written = edit(aten.mul_.Tensor, factor)
    factor.fill_(3.0)
    values = torch.ones(4)
    history(written).apply_(values)
    assert values.tolist() == [0.5] * 4
    assert history(written) == history(edit(aten.mul_.Tensor, torch.tensor(0.5)))


def test_what_pytorch_refuses_is_refused_when_it_is_recorded() -> None:
    with pytest.raises(RuntimeError):
        edit(aten.clamp_.default, 1e300, None, dtype=torch.float16)
    with pytest.raises(RuntimeError):
        edit(aten.clamp_.default, None, None)
