"""Seconds of computation that moving a byte costs, learned from passes."""

import pytest

from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.pass_profile import IoOverhead
from offload_strategy.units import MiB

SAVED = 1000 * MiB
SLOPE = pytest.approx(1.0 / (2 * SAVED), rel=0.1)


def overhead(*passes, held=0.0, kind=7):
    """Seconds per byte, of passes of bytes and seconds; `kind` and `held` are of the last one."""
    io_overhead = IoOverhead()
    for left, seconds in [(0, 99.0), *passes]:  # the first warms up
        trace = Trace(saved_bytes=SAVED, left_bytes=left, prefixes=[7])
        if (left, seconds) == passes[-1]:
            trace.held, trace.prefixes = held, [kind]
        trace.uses = [(0, trace.started_at + seconds + trace.held, 0.0)]
        io_overhead.observe(trace)
    return io_overhead.per_byte


def test_overhead_is_the_slope_of_computing_over_what_is_moved():
    assert overhead((SAVED, 3.0), (SAVED, 3.0), (0, 2.0)) == SLOPE
    assert overhead((0, 2.0)) == 0
    # Passes that move nearly the same, of another kind, and waits do not count.
    assert overhead((SAVED, 3.0), (SAVED, 3.1), (int(0.9 * SAVED), 2.0)) == 0
    assert overhead((SAVED, 3.0), (0, 1.0), kind=8) == 0
    assert overhead((0, 2.0), (SAVED, 2.0), held=5.0) == pytest.approx(0.0)
    # A disturbance is bounded, and one slow pass of many does not decide.
    assert overhead((SAVED, 1000.0), (0, 2.0)) == 3e-9
    assert overhead((SAVED, 1.0), (0, 2.0)) == 0
    noisy = [(SAVED, 3.01), (SAVED, 2.99), (SAVED, 9.0), (SAVED, 3.0), (0, 2.0), (0, 2.01)]
    assert overhead(*noisy) == SLOPE
