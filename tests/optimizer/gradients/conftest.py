from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.optimizer.gradients.pairs")

from tests.optimizer.gradients.pairs import SOURCES, MakePair, Pair, gradient  # noqa: E402
from tests.store.conftest import make_rig, rig  # noqa: E402
from tests.store.rig import Rig  # noqa: E402

__all__ = ["kind", "make_rig", "pair_of", "rig"]


@pytest.fixture(params=SOURCES)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of source that has the values."""
    found: str = request.param
    return found


@pytest.fixture
def pair_of(kind: str, rig: Rig) -> MakePair:
    """Makes a plain gradient and an offloaded gradient for the same."""

    def make(values: torch.Tensor | None = None) -> Pair:
        return Pair.of(gradient() if values is None else values, kind, rig)

    return make
