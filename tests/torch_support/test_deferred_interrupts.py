"""Ctrl-C never cuts bookkeeping in two, and is never lost."""

from __future__ import annotations

import signal
import threading

import pytest

from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection


def test_an_interrupt_inside_comes_at_the_end():
    reached = False
    with pytest.raises(KeyboardInterrupt), UninterruptedSection():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sections_may_be_nested_and_the_outermost_delivers():
    steps = []
    with pytest.raises(KeyboardInterrupt), UninterruptedSection():  # noqa: PT012
        with UninterruptedSection():
            signal.raise_signal(signal.SIGINT)
            steps.append("inner")
        steps.append("outer")
    assert steps == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_with_a_handler_of_its_own_keeps_it():
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
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_and_ignored_signals_are_left_alone():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with UninterruptedSection():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)

    problems = []

    def work():
        try:
            with UninterruptedSection():
                pass
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert problems == []
