"""The engine of most tests of activations."""

import pytest

from tests.training import activations_only


@pytest.fixture
def engine(disk):
    with activations_only(disk) as made:
        yield made
