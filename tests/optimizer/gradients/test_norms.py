"""Norms of offloaded gradients, cached in advance or not, and the check for overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients.gradient_backing import has_overflow, norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from tests.optimizer.gradients.acts import PREPARED, scaled, unscaled
from tests.optimizer.gradients.pairs import (
    DTYPES,
    MakePair,
    assert_same,
    forbid_loading,
    gradient,
)
from tests.optimizer.gradients.test_offloaded_gradient import EVERY_PAIR

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


@EVERY_PAIR
def test_norms_are_those_of_the_plain_gradient_and_can_be_cached_in_advance(
    pair_of: MakePair,
    dtype: torch.dtype,
    layout: str,
    prepared: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = gradient(dtype, layout, shape=(131, 77))
    for order in ORDERS:
        first, second = pair_of(values), pair_of(values)
        for pair in (first, second):
            pair.same(PREPARED[prepared])
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
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prepared", PREPARED)
def test_unscaling_finds_every_value_that_is_not_finite(
    pair_of: MakePair, dtype: torch.dtype, prepared: str, bad: float | None
) -> None:
    values = gradient(dtype)
    if bad is not None:
        values[30, 20] = bad
    pair = pair_of(values)
    pair.same(PREPARED[prepared])
    found = pair.same(lambda g: unscaled(g, 0.25))
    # Clamping takes infinities away.
    clamped = prepared == "with steps" and bad == -torch.inf
    assert found == float(bad is not None and not clamped)
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


# ---------------------------------------------------------------------- the check in one pass
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
EXPONENT_BITS = {torch.float64: 11, torch.float32: 8, torch.float16: 5, torch.bfloat16: 8}


def _special_values(dtype: torch.dtype) -> list[torch.Tensor]:
    """From their bits, as a signalling NaN would not survive a conversion."""
    width = 8 * dtype.itemsize
    mantissa_bits = width - 1 - EXPONENT_BITS[dtype]
    mantissa = (1 << mantissa_bits) - 1
    infinity = ((1 << EXPONENT_BITS[dtype]) - 1) << mantissa_bits
    finite = (0, 1, mantissa, 1 << mantissa_bits, infinity - 1)
    nan = (infinity | 1, infinity | mantissa >> 1, infinity | 1 << (mantissa_bits - 1))
    bits = [*finite, infinity, *nan, infinity | mantissa]
    bits += [each - (1 << (width - 1)) for each in bits]  # the sign bit
    # Finite in fp32 and bf16, though its square is not; infinite in fp16.
    large = torch.tensor([1e30]).to(dtype)
    return [*torch.tensor(bits, dtype=INTEGERS[dtype.itemsize]).view(dtype).split(1), large]


@pytest.mark.parametrize("dtype", EXPONENT_BITS, ids=str)
def test_every_special_value_gets_torchs_verdict_wherever_it_is(dtype: torch.dtype) -> None:
    values = _special_values(dtype)
    verdicts = [bool(value.isinf() | value.isnan()) for value in values]
    assert sum(verdicts) == 10 + (dtype is torch.float16)
    assert not has_overflow(torch.zeros(3, 0, dtype=dtype).t())
    for size in (1, 2, 7, 16, 33, 65, 1000):
        tensor = torch.randn(size).to(dtype)
        assert not has_overflow(tensor)
        for position in range(0, size, max(1, size // 40)):
            before = tensor[position].clone()
            for value, verdict in zip(values, verdicts, strict=True):
                tensor[position] = value[0]
                assert has_overflow(tensor) == verdict, f"{value} at {position} of {size}"
            tensor[position] = before


@pytest.mark.parametrize("layout", ["dense", "permuted", "with gaps"])
def test_any_layout_in_memory_without_a_copy_of_dense_ones(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda v: (seen.append(v.is_contiguous()), aminmax(v))[1])
    # So large that the work is split over threads.
    tensor = torch.randn(303, 50, 67)
    view = {"dense": tensor, "permuted": tensor.permute(2, 0, 1), "with gaps": tensor[:, 1::2]}
    inside = view[layout]
    assert not has_overflow(inside)
    for share in (0.0, 0.3, 0.5, 1.0):
        place = tuple(int(share * (size - 1)) for size in inside.shape)
        before = inside[place].clone()
        inside[place] = torch.nan
        assert has_overflow(inside), place
        inside[place] = before
    assert all(seen) == (layout != "with gaps")
