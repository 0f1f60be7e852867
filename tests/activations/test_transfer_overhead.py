"""What it costs that items move, learned from passes that move more and less."""

from __future__ import annotations

import random

import pytest

from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.pass_profile import IoOverhead
from offload_strategy.units import MiB

SAVED = 1000 * MiB


def a_pass(left: int, seconds: float, *, kind: int = 7, held: float = 0.0) -> Trace:
    trace = Trace()
    trace.prefixes = [kind]
    trace.saved_bytes, trace.left_bytes, trace.held = SAVED, left, held
    trace.uses = [(0, trace.started_at + seconds + held, 0.0)]
    return trace


def observed(*passes: tuple[int, float]) -> IoOverhead:
    io_overhead = IoOverhead()
    io_overhead.observe(a_pass(0, 99.0))  # warms up
    for left, seconds in passes:
        io_overhead.observe(a_pass(left, seconds))
    return io_overhead


def test_it_is_the_slope_of_computing_over_what_is_moved() -> None:
    io_overhead = observed((SAVED, 3.0), (SAVED, 3.0), (0, 2.0))
    assert io_overhead.per_byte == pytest.approx(1.0 / (2 * SAVED))
    assert io_overhead.seconds(a_pass(SAVED // 2, 2.5)) == pytest.approx(0.5)


def test_nothing_is_known_of_passes_that_move_the_same() -> None:
    assert observed((SAVED, 3.0), (SAVED, 3.1), (int(0.9 * SAVED), 2.0)).per_byte == 0
    assert observed().per_byte == 0


def test_passes_of_other_kinds_do_not_count() -> None:
    io_overhead = observed((SAVED, 3.0))
    io_overhead.observe(a_pass(0, 1.0, kind=8))
    io_overhead.observe(a_pass(0, 1.0, kind=8))
    assert io_overhead.per_byte == 0


def test_waits_are_no_toll() -> None:
    io_overhead = observed((0, 2.0))
    io_overhead.observe(a_pass(SAVED, 2.0, held=5.0))
    assert io_overhead.per_byte == pytest.approx(0.0)


def test_a_disturbance_is_bounded() -> None:
    assert observed((SAVED, 1000.0), (0, 2.0)).per_byte == 3e-9
    assert observed((SAVED, 1.0), (0, 2.0)).per_byte == 0


def test_one_slow_pass_of_many_does_not_decide() -> None:
    dice = random.Random(0)
    passes = [(SAVED, 3 + dice.gauss(0, 0.02)) for _ in range(5)]
    passes += [(0, 2 + dice.gauss(0, 0.02)) for _ in range(5)]
    passes[2] = (SAVED, 9.0)
    assert observed(*passes).per_byte == pytest.approx(1.0 / (2 * SAVED), rel=0.1)
