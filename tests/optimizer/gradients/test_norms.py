"""Norms of offloaded gradients, unscaling them, and which recorded edits are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.gradients.recorded_edits import UNSCALE, Edit, EditHistory
from tests.optimizer.gradients.acts import PREPARED, scaled, unscaled
from tests.optimizer.gradients.pairs import (
    DTYPES,
    LAYOUTS,
    MakePair,
    assert_same,
    forbid_loading,
    gradient,
)

ORDERS = [2, 2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0, 0.5]
NORMS: dict[str, Callable[[Any, float], torch.Tensor]] = {
    "vector_norm": lambda g, order: torch.linalg.vector_norm(g, order),
    "torch.norm": lambda g, order: torch.norm(g, order),
    "method": lambda g, order: g.norm(order),
    "of data": lambda g, order: g.data.norm(order),
    "listed": lambda g, order: torch._foreach_norm([g], order)[0],
    "total": lambda g, order: nn.utils.get_total_norm([g], order),
    "total, not as a list": lambda g, order: nn.utils.get_total_norm([g], order, foreach=False),
    "total, as a list": lambda g, order: nn.utils.get_total_norm([g], order, foreach=True),
}


def test_norms_are_those_of_the_plain_gradient_and_can_be_cached_in_advance(
    prepared_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for order in ORDERS:
        first, second = prepared_pair((131, 77)), prepared_pair((131, 77))
        for norm in NORMS.values():
            result = first.same(lambda g, norm=norm, order=order: norm(g, order))
            assert type(result) is torch.Tensor
        edits = second.backing.history
        # Updates ahead of step() compute what was requested of the gradient as it came.
        assert first.backing.requested_norms == (set() if edits else {float(order)})
        values_now = edits.apply_(second.backing.raw().clone())
        second.backing.cache_norm(order, norm_of(values_now, order))
        with monkeypatch.context() as patch:
            forbid_loading(second.offloaded, patch)
            for norm in NORMS.values():
                second.same(lambda g, norm=norm, order=order: norm(g, order))
                # Whoever gets a norm may change it.
                norm(second.offloaded, order).fill_(7)


def test_a_norm_is_forgotten_when_the_values_change(pair_of: MakePair) -> None:
    pair = pair_of()
    for act in (
        lambda g: g.norm(),
        lambda g: g.mul_(0.5).norm(),
        lambda g: g.mul_(1.0).norm(),
        lambda g: g.add_(1).norm(),
        lambda g: (g.view(-1).mul_(3), g.norm()),
        lambda g: g.zero_().norm(),
        lambda g: g.copy_(torch.ones_like(g)).norm(),
    ):
        pair.same(act)
    pair = pair_of()
    pair.same(lambda g: g.norm())
    pair.same(lambda g: (setattr(g, "data", torch.ones_like(g)), g.norm()))


def test_other_arguments_of_norms(pair_of: MakePair) -> None:
    for act in (
        lambda g: g.norm(2, dim=0),
        lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
        lambda g: torch.linalg.norm(g),
        lambda g: g.norm("fro"),
        lambda g: torch._foreach_norm([g, torch.ones(3), g]),
        lambda g: torch._foreach_norm([g], ord=1),
        lambda g: torch.linalg.vector_norm(g, 2, out=torch.empty(())),
    ):
        pair = pair_of()
        pair.same(scaled)
        pair.same(act)
        assert not pair.edited


def test_a_norm_of_values_changed_directly_is_not_the_cached_one() -> None:
    values = gradient()
    offloaded = OffloadedGradient.of(values, like=values)
    offloaded.norm()
    assert not offloaded.backing.edited
    values.mul_(2)
    assert offloaded.backing.edited
    assert_same(offloaded.norm(), values.norm())
    assert offloaded.backing.edited
    another = OffloadedGradient.of(values, like=values)
    another.mul_(0.5)
    another.backing.values()
    assert not another.backing.edited
    values.add_(1)
    another.backing.values()
    assert another.backing.edited


# ---------------------------------------------------------------------- unscaling
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "largest", "usual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prepared", PREPARED)
def test_unscaling_finds_every_value_that_is_not_finite(
    pair_of: MakePair, dtype: torch.dtype, layout: str, prepared: str, value: str
) -> None:
    for place in ((0, 0), (30, 20), (-1, -1)):
        values = gradient(dtype, layout)
        if value != "usual":
            values[place] = torch.finfo(dtype).max if value == "largest" else float(value)
        pair = pair_of(values)
        pair.same(PREPARED[prepared])
        found = pair.same(lambda g: unscaled(g, 0.25))
        # Clamping takes negative infinity away.
        assert found == (value in ("inf", "nan") or (value, prepared) == ("-inf", "as it came"))
        pair.check()
        assert not pair.edited


def test_unscaling_looks_at_the_values_only_if_the_norm_does_not_tell(
    pair_of: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of()
    pair.backing.cache_norm(1.0, norm_of(pair.plain, 1.0))
    with monkeypatch.context() as patch:
        forbid_loading(pair.offloaded, patch)
        assert pair.same(lambda g: unscaled(g, 0.5)) == 0
    pair.check()
    # The norm of finite values can overflow.
    large = pair_of(torch.full((5, 5), 1e30))
    large.backing.cache_norm(2.0, norm_of(large.plain))
    assert large.offloaded.norm().isinf()
    assert large.same(lambda g: unscaled(g, 0.5)) == 0
    # Some orders say nothing.
    values = gradient()
    values[1, 1] = torch.inf
    silent = pair_of(values)
    for order in (0.0, float("-inf"), -1.0):
        silent.backing.cache_norm(order, norm_of(values, order))
        assert silent.offloaded.backing.norm(order).isfinite()
    assert silent.same(lambda g: unscaled(g, 0.5)) == 1


# ---------------------------------------------------------------------- recorded edits
aten = torch.ops.aten
MUL = aten.mul_.Tensor
Arguments = tuple[Any, ...]


def edit(op: Any, *arguments: Any, dtype: torch.dtype = torch.float32) -> Edit:
    return Edit.of(op, arguments, dtype, torch.device("cpu"))


def history(*edits: Arguments) -> EditHistory:
    return EditHistory(tuple(edit(*each) for each in edits))


_MORE_THAN_ONE = math.nextafter(1.0, 2.0)
_FACTORS = [0.3, 0.0, -0.0, 2, 2.0, math.nan, _MORE_THAN_ONE]
_TENSORS = [torch.tensor(0.3, dtype=d) for d in (torch.float16, torch.float32, torch.float64)]
EDITS: list[Arguments] = [
    *((MUL, factor) for factor in _FACTORS),
    *((MUL, factor) for factor in _TENSORS),
    (MUL, torch.tensor(_MORE_THAN_ONE, dtype=torch.float64)),
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
    *((MUL, factor) for factor in (1, 1.0, torch.tensor(1.0))),
    (aten.div_.Tensor, 1.0),
    (aten._foreach_mul_.Tensor, torch.tensor(1.0)),
    (UNSCALE, torch.tensor([1.0])),
]


def test_a_history_equals_only_itself() -> None:
    one, other = EDITS[0], EDITS[-4]
    edits = [*((each,) for each in EDITS), (one, other), (other, one), (one, one)]
    histories = [history(*each) for each in edits]
    for index, mine in enumerate(histories):
        assert mine
        assert mine != "something else"
        for other_index, theirs in enumerate(histories):
            assert (mine == theirs) == (index == other_index), (edits[index], edits[other_index])
        assert hash(history(*edits[index])) == hash(mine)


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
