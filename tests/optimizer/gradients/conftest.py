from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.optimizer.gradients.pairs")

from tests.heap.conftest import make_rig, rig  # noqa: E402

__all__ = ["make_rig", "rig"]
