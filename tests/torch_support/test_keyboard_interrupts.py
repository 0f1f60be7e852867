"""Ctrl-C never cuts bookkeeping in two and is never lost, and grad mode is what it was."""

import signal
from contextlib import contextmanager

import pytest
import torch

from offload_strategy.torch_support.keyboard_interrupts import (
    UninterruptedSection,
    default_modes,
    keeps_grad_mode,
)


def test_an_interrupt_inside_comes_at_the_end_of_the_outermost_section():
    steps = []
    with pytest.raises(KeyboardInterrupt), UninterruptedSection():  # noqa: PT012
        with UninterruptedSection():
            signal.raise_signal(signal.SIGINT)
            steps.append("inner")
        steps.append("outer")
    assert steps == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_is_called_and_an_ignored_signal_is_left_alone():
    seen = []

    def own(number, frame):
        seen.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with UninterruptedSection():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with UninterruptedSection():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def nested():
    with default_modes():
        yield


def test_a_block_that_never_began_changes_nothing_later():
    """As when a signal comes just after the begin, and the traceback goes some time later."""
    with torch.no_grad():
        begun = nested()
        begun.__enter__()
    assert torch.is_grad_enabled()
    del begun
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_grad_mode_is_restored_however_a_block_or_a_function_ends(before):
    def fail():
        with nested():
            assert not torch.is_grad_enabled()
            raise KeyboardInterrupt

    @keeps_grad_mode
    def interrupted():
        torch.set_grad_enabled(not before)  # and a block begins and never ends
        raise KeyboardInterrupt

    with torch.set_grad_enabled(before):
        for function in (fail, interrupted):
            with pytest.raises(KeyboardInterrupt):
                function()
            assert torch.is_grad_enabled() is before
        with nested():
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() is before
