"""Grad mode is what it was, wherever Ctrl-C comes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from offload_strategy.torch_support.grad_mode import keeps_grad_mode, no_grad


@contextmanager
def nested() -> Iterator[None]:
    with no_grad():
        yield


def test_a_block_that_never_began_changes_nothing_later() -> None:
    """As when a signal comes just after the begin, and the traceback goes some time later."""
    with torch.no_grad():
        begun = nested()
        begun.__enter__()
    assert torch.is_grad_enabled()
    del begun
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_a_block_ends(before: bool) -> None:
    with torch.set_grad_enabled(before):
        with nested():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() is before

        def fail() -> None:
            with nested():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert torch.is_grad_enabled() is before


@pytest.mark.parametrize("before", [True, False])
def test_what_begins_a_block_and_never_ends_it(before: bool) -> None:
    @keeps_grad_mode
    def interrupted() -> None:
        torch.set_grad_enabled(not before)
        raise KeyboardInterrupt

    with torch.set_grad_enabled(before):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert torch.is_grad_enabled() is before
