from itertools import product

import pytest

pytest.register_assert_rewrite("tests.optimizer.gradients.pairs")

from tests.optimizer.gradients.acts import PREPARED  # noqa: E402
from tests.optimizer.gradients.pairs import DTYPES, LAYOUTS, SOURCES, Pair, gradient  # noqa: E402
from tests.store.conftest import make_rig, rig  # noqa: E402
from tests.training import in_turn  # noqa: E402

__all__ = ["make_rig", "pair_of", "prepared_pair", "rig"]


@pytest.fixture(params=SOURCES)
def pair_of(request, rig):
    """Makes a plain gradient and an offloaded gradient for the same, of each kind of source."""

    def make(values=None):
        return Pair.of(gradient() if values is None else values, request.param, rig)

    return make


@pytest.fixture(params=in_turn(product(DTYPES, LAYOUTS), [*PREPARED, *reversed(PREPARED)]), ids=str)
def prepared_pair(request, pair_of):
    """Makes pairs of each dtype in each layout, and each of both as it came and with steps."""
    (dtype, layout), prepared = request.param

    def make(shape=(7, 5)):
        pair = pair_of(gradient(dtype, layout, shape))
        pair.same(PREPARED[prepared])
        return pair

    return make
