"""An offloaded gradient answers as the plain one does: values, errors, aliases, steps, norms."""

from itertools import product

import pytest
import torch
from torch import nn

from offload_strategy.optimizer.gradients.gradient_backing import norm_of
from offload_strategy.optimizer.gradients.offloaded_gradient import OffloadedGradient
from offload_strategy.optimizer.gradients.recorded_edits import Edit, EditHistory
from tests.optimizer.gradients.acts import ALIASES, PINS, PREPARED, READS, STEPS, scaled, unscaled
from tests.optimizer.gradients.pairs import (
    DTYPES,
    LAYOUTS,
    Pair,
    Raised,
    assert_same,
    for_each,
    forbid_loading,
    gradient,
    outcome,
)


def test_reads_give_what_the_plain_gradient_gives(prepared_pair):
    def check(act):
        pair = prepared_pair()
        history = pair.backing.history
        result = pair.same(act)
        pair.check()
        for made in result if isinstance(result, list | tuple) else [result]:
            if type(made) is torch.Tensor:
                made.zero_()  # whoever gets a copy may change it
        pair.check()
        assert not pair.edited
        assert not pair.backing.is_materialized
        assert pair.backing.history == history

    for_each(READS, check)


def _same_result(pair, act):
    """Results, plain and offloaded, of an act that may return what it is done to."""
    expected, result = outcome(act, pair.plain), outcome(act, pair.offloaded)
    assert (expected is pair.plain) == (result is pair.offloaded)
    assert_same(result, expected)
    pair.check()
    return expected, result


def test_writes_and_aliases_do_what_they_do_to_the_plain_gradient(prepared_pair):
    def check(act):
        pair = prepared_pair()
        expected, result = _same_result(pair, act)
        if pair.plain.dtype is torch.float32 and not isinstance(result, Raised):
            assert pair.edited
        # Aliases see what comes later.
        pair.same(lambda g: g.mul_(3))
        assert_same(result, expected)
        pair.check()

    for_each(PINS, check)


def test_edits_are_recorded_and_give_the_same_bits(prepared_pair):
    def check(act):
        pair = prepared_pair()
        _same_result(pair, act)
        assert not pair.edited
        pair.same(lambda g: g._version)
        # An update ahead of step() starts from the raw values, one at step() gets the edited ones.
        assert_same(pair.backing.history.apply_(pair.backing.raw().clone()), pair.plain)
        for _ in range(2):
            assert_same(pair.backing.values(), pair.plain)
        pair.check()
        for later in (lambda g: g.mul_(0.7), lambda g: g.add_(1)):
            pair.same(later)
            assert_same(pair.backing.values(), pair.plain)
        pair.check()

    for_each(STEPS, check)


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("prepared", PREPARED)
def test_an_alias_shares_the_values_both_ways(pair_of, alias, prepared):
    for act, through_alias in product((*STEPS.values(), *PINS.values()), (True, False)):
        pair = pair_of(gradient(shape=(7, 5)))
        pair.same(PREPARED[prepared])
        other = Pair(ALIASES[alias](pair.plain), ALIASES[alias](pair.offloaded))
        assert other.offloaded is not pair.offloaded
        first, second = (other, pair) if through_alias else (pair, other)
        for one, does in ((first, act), (second, lambda g: g.add_(1))):
            one.same(does)
            other.check()
            pair.check()


#: What starts something else, or tells two tensors apart, or has random or undefined contents.
_DIFFERENT = """
    __class__ __dict__ __doc__ __module__ __weakref__ __subclasshook__ __init_subclass__ __new__
    __init__ __dir__ __hash__ __getattribute__ __getstate__ __sizeof__ __torch_function__
    __torch_dispatch__ __setstate__ __reduce__ __reduce_ex__ __iter__ __annotations__ __dlpack__
    __dlpack_c_exchange_api__ _python_dispatch _use_count _cdata _lazy_clone backward data_ptr
    const_data_ptr cuda xpu hpu mtia ipu module_load values new new_empty bernoulli bernoulli_
    exponential_ geometric_ cauchy_ log_normal_ normal_ random_ uniform_ multinomial
"""


@pytest.mark.filterwarnings("ignore")
def test_every_attribute_and_every_method_without_arguments(pair_of):
    different = []
    for name in sorted(set(dir(torch.Tensor)).difference(_DIFFERENT.split())):
        pair = pair_of(gradient(shape=(4, 4)))
        pair.same(scaled)

        def act(g, name=name):
            attribute = getattr(g, name)
            return attribute() if callable(attribute) else attribute

        expected, result = outcome(act, pair.plain), outcome(act, pair.offloaded)
        try:
            if isinstance(expected, torch.Tensor | tuple | list | int | float | str | Raised):
                assert_same(result, expected)
            else:
                assert type(result) is type(expected)
            pair.check()
        except AssertionError as error:
            different.append(f"{name}: {error}")
    assert not different, "\n\n".join(different)


# ---------------------------------------------------------------------- norms
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


def test_norms_are_those_of_the_plain_gradient_and_may_be_cached(prepared_pair, monkeypatch):
    for order in (2, 2.0, 1.0, torch.inf, -torch.inf, 0.0, 3.0, 0.5):
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


def test_where_subnormal_numbers_are_flushed_times_one_counts():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        edit = Edit.of(torch.ops.aten.mul_.Tensor, (1.0,), torch.float32, torch.device("cpu"))
    finally:
        torch.set_flush_denormal(False)
    assert EditHistory((edit,))
