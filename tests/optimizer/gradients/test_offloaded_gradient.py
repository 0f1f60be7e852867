"""An offloaded gradient answers as the plain gradient does: values, errors, aliases and steps."""

import re

import pytest
import torch

from tests.optimizer.gradients.acts import ALIASES, PINS, PREPARED, READS, STEPS, scaled
from tests.optimizer.gradients.pairs import Pair, Raised, assert_same, for_each, gradient, outcome


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
        assert_same(pair.backing.values(), pair.plain)
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
    for act in (*STEPS.values(), *PINS.values()):
        for through_alias in (True, False):
            pair = pair_of(gradient(shape=(7, 5)))
            pair.same(PREPARED[prepared])
            other = Pair(ALIASES[alias](pair.plain), ALIASES[alias](pair.offloaded))
            assert other.offloaded is not pair.offloaded
            (other if through_alias else pair).same(act)
            other.check()
            pair.check()
            (pair if through_alias else other).same(lambda g: g.add_(1))
            other.check()
            pair.check()


# ---------------------------------------------------------------------- every method there is
#: What starts something else, or tells two tensors apart, or has random or undefined contents.
_DIFFERENT = frozenset(
    re.findall(
        r"\w+",
        """
    __class__ __dict__ __doc__ __module__ __weakref__ __subclasshook__ __init_subclass__ __new__
    __init__ __dir__ __hash__ __getattribute__ __getstate__ __sizeof__ __torch_function__
    __torch_dispatch__ __setstate__ __reduce__ __reduce_ex__ __iter__ __annotations__ __dlpack__
    __dlpack_c_exchange_api__ _python_dispatch _use_count _cdata _lazy_clone backward data_ptr
    const_data_ptr cuda xpu hpu mtia ipu module_load values new new_empty bernoulli bernoulli_
    exponential_ geometric_ cauchy_ log_normal_ normal_ random_ uniform_ multinomial
    """,
    )
)


@pytest.mark.filterwarnings("ignore")
def test_every_attribute_and_every_method_without_arguments(pair_of):
    different = []
    for name in sorted(set(dir(torch.Tensor)).difference(_DIFFERENT)):
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
