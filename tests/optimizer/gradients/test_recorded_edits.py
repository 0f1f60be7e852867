"""Recipes: what is written down, when two are equal, and that they do the same once more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from offload_strategy.optimizer.gradients.recorded_edits import UNSCALE, Recipe, Step
from tests.optimizer.gradients.pairs import DTYPES, assert_same, gradient

aten = torch.ops.aten
CPU = torch.device("cpu")


def step(op: Any, *arguments: Any, dtype: torch.dtype = torch.float32) -> Step:
    return Step.of(op, arguments, dtype, CPU)


def recipe(*steps: Step) -> Recipe:
    return Recipe(steps)


STEPS: dict[str, Any] = {
    "times a number": lambda: step(aten.mul_.Tensor, 0.3),
    "times the same in half precision": lambda: step(
        aten.mul_.Tensor, torch.tensor(0.3, dtype=torch.float16)
    ),
    "times a tensor": lambda: step(aten.mul_.Tensor, torch.tensor(0.3)),
    "times a double": lambda: step(aten.mul_.Tensor, torch.tensor(0.3, dtype=torch.float64)),
    "times zero": lambda: step(aten.mul_.Tensor, 0.0),
    "times minus zero": lambda: step(aten.mul_.Tensor, -0.0),
    "times two": lambda: step(aten.mul_.Tensor, 2),
    "times two as a float": lambda: step(aten.mul_.Tensor, 2.0),
    "by a number": lambda: step(aten.div_.Tensor, 0.3),
    "as one of a list": lambda: step(aten._foreach_mul_.Scalar, 0.3),
    "as one of a list, by a number of its own": lambda: step(aten._foreach_mul_.ScalarList, 0.3),
    "as one of a list, by a tensor": lambda: step(aten._foreach_mul_.Tensor, torch.tensor(0.3)),
    "divided as one of a list": lambda: step(aten._foreach_div_.Scalar, 0.3),
    "clamped": lambda: step(aten.clamp_.default, -0.5, 0.5),
    "clamped above": lambda: step(aten.clamp_.default, None, 0.5),
    "clamped below": lambda: step(aten._foreach_clamp_min_.Scalar, -0.5),
    "unscaled": lambda: step(UNSCALE, torch.tensor(0.3)),
    "times NaN": lambda: step(aten.mul_.Tensor, math.nan),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_only_itself(name: str) -> None:
    mine = recipe(STEPS[name]())
    for other in STEPS:
        again = recipe(STEPS[other]())
        assert (mine == again) == (name == other), other
        assert mine != again or hash(mine) == hash(again)
    assert mine
    assert mine != "something else"


def test_order_and_number_of_steps_count() -> None:
    one, other = STEPS["times a number"](), STEPS["clamped"]()
    assert recipe(one, other) != recipe(other, one)
    assert recipe(one) != recipe(one, one)
    assert recipe(one).then(other) == recipe(one, other)
    assert recipe(one, other).after(1) == recipe(other)
    assert recipe(one, other).after(0) == recipe(one, other)
    assert {recipe(one): 1}[recipe(STEPS["times a number"]())] == 1


IDENTITIES: dict[str, Any] = {
    "times one": lambda: step(aten.mul_.Tensor, 1),
    "times one as a float": lambda: step(aten.mul_.Tensor, 1.0),
    "times a tensor of one": lambda: step(aten.mul_.Tensor, torch.tensor(1.0)),
    "by one": lambda: step(aten.div_.Tensor, 1.0),
    "a list times a tensor of one": lambda: step(aten._foreach_mul_.Tensor, torch.tensor(1.0)),
    "unscaled by one": lambda: step(UNSCALE, torch.tensor([1.0])),
}


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_that_change_nothing_do_not_count(name: str, dtype: torch.dtype) -> None:
    assert not recipe(IDENTITIES[name]())
    one = STEPS["times a number"]()
    assert recipe(one, IDENTITIES[name]()) == recipe(one)
    assert hash(recipe(IDENTITIES[name]())) == hash(Recipe())
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
    assert recipe(flushing)
    assert recipe(flushing) == recipe(flushing)


def test_only_times_one_is_no_step_and_what_is_nearly_one_is() -> None:
    above = math.nextafter(1.0, 2.0)
    assert recipe(step(aten.mul_.Tensor, above))
    assert recipe(step(aten.mul_.Tensor, torch.tensor(above, dtype=torch.float64)))
    assert recipe(step(aten.clamp_.default, -1.0, 1.0))
    assert recipe(step(aten.clamp_.default, None, 1.0))


def test_arguments_are_those_of_the_time() -> None:
    factor = torch.tensor(0.5)
    written = step(aten.mul_.Tensor, factor)
    factor.fill_(3.0)
    values = torch.ones(4)
    recipe(written).apply_(values)
    assert values.tolist() == [0.5] * 4
    assert recipe(written) == recipe(step(aten.mul_.Tensor, torch.tensor(0.5)))


REPLAYED: dict[str, Any] = {
    "mul_ by a number": (lambda g: g.mul_(0.3), [(aten.mul_.Tensor, 0.3)]),
    "mul_ by a tensor": (
        lambda g: g.mul_(torch.tensor(0.3)),
        [(aten.mul_.Tensor, torch.tensor(0.3))],
    ),
    "div_ by an integer": (lambda g: g.div_(3), [(aten.div_.Tensor, 3)]),
    "a list divided by numbers": (
        lambda g: torch._foreach_div_([g], [0.3]),
        [(aten._foreach_div_.ScalarList, 0.3)],
    ),
    "unscaled": (
        lambda g: torch._amp_foreach_non_finite_check_and_unscale_(
            [g], torch.zeros(()), torch.tensor(0.3)
        ),
        [(UNSCALE, torch.tensor(0.3))],
    ),
    "several": (
        lambda g: torch._foreach_clamp_max_([g.mul_(0.3).div_(0.7).clamp_(-0.2)], 0.1),
        [
            (aten.mul_.Tensor, 0.3),
            (aten.div_.Tensor, 0.7),
            (aten.clamp_.default, -0.2),
            (aten._foreach_clamp_max_.Scalar, 0.1),
        ],
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REPLAYED)
def test_carried_out_later_they_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    do, steps = REPLAYED[name]
    expected = gradient(dtype)
    do(expected)
    replayed = gradient(dtype)
    recipe(*(step(op, *rest, dtype=dtype) for op, *rest in steps)).apply_(replayed)
    assert_same(replayed, expected)


def test_what_pytorch_refuses_is_refused_when_it_is_written_down() -> None:
    with pytest.raises(RuntimeError):
        step(aten.clamp_.default, 1e300, None, dtype=torch.float16)
    with pytest.raises(RuntimeError):
        step(aten.clamp_.default, None, None)


def test_a_recipe_says_what_it_does() -> None:
    text = repr(recipe(STEPS["times a tensor"](), STEPS["clamped"](), IDENTITIES["by one"]()))
    assert text == "Recipe(mul_(0.30000001192092896), clamp_(-0.5, 0.5))"
