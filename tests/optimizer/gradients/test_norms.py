"""Norms of offloaded gradients, and unscaling them."""

from itertools import product

import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.gradients.recorded_edits import Edit, EditHistory
from tests.optimizer.gradients.acts import PREPARED, unscaled
from tests.optimizer.gradients.pairs import DTYPES, LAYOUTS, assert_same, forbid_loading, gradient

ORDERS = [2, 2.0, 1.0, float("inf"), float("-inf"), 0.0, 3.0, 0.5]
NORMS = {
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
    prepared_pair, monkeypatch
):
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


def test_a_norm_is_forgotten_when_the_values_change(pair_of):
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


def test_a_norm_of_values_changed_directly_is_not_the_cached_one():
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prepared", PREPARED)
def test_unscaling_finds_every_value_that_is_not_finite(pair_of, dtype, layout, prepared):
    bad = (torch.inf, -torch.inf, torch.nan)
    for value, place in product((*bad, torch.finfo(dtype).max, 0.0), ((0, 0), (30, 20), (-1, -1))):
        values = gradient(dtype, layout)
        values[place] = value
        pair = pair_of(values)
        pair.same(PREPARED[prepared])
        found = pair.same(lambda g: unscaled(g, 0.25))
        # Clamping takes negative infinity away.
        clamped = prepared == "with steps" and value == -torch.inf
        assert found == (value in bad and not clamped)
        pair.check()
        assert not pair.edited


def test_unscaling_looks_at_the_values_only_if_the_norm_does_not_tell(pair_of, monkeypatch):
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


def test_where_subnormal_numbers_are_flushed_times_one_counts():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        edit = Edit.of(torch.ops.aten.mul_.Tensor, (1.0,), torch.float32, torch.device("cpu"))
    finally:
        torch.set_flush_denormal(False)
    assert EditHistory((edit,))
