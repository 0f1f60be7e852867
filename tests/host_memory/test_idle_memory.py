"""Idle buffers stay while they make the process no larger than it gets anyway."""

import errno
import os

import psutil
import pytest
import torch

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory import idle_memory as idle
from offload_strategy.host_memory import memory_limits, pool
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.units import MiB
from tests.host_memory.test_pool import acquire
from tests.support import raising

_OTHER = 500 * MiB


class Process:
    """A process of which the rest, beside what a pool holds, has the size that a test wants."""

    def __init__(self, monkeypatch):
        self.pool = BufferPool(512 * MiB)
        self.rest = _OTHER
        self.freed = self.peak = 0
        monkeypatch.setattr(idle, "resident_bytes", self.resident)
        monkeypatch.setattr(idle.freed_memory, "nbytes", lambda: self.freed)
        monkeypatch.setattr(idle, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(idle, "_ROOM_SECONDS", 0.0)

    def resident(self, *_):
        resident = self.rest + self.pool._held
        self.peak = max(self.peak, resident)
        return resident

    def one_pass(self, forward, backward, loss=0):
        """Forward gets larger and larger, the loss all at once; backward uses buffers. The peak."""
        self.peak = 0
        self.pool.pass_begins()
        for part in range(11):
            self.rest = _OTHER + part * forward // 10
            self.pool.look()
        self.rest += loss
        self.resident()
        acquired = []
        for part in range(11):
            acquired.append(acquire(self.pool, backward // 10))
            del acquired[:-10]
            self.pool.look()
            self.rest = _OTHER + (10 - part) * forward // 10
        self.resident()
        del acquired
        self.rest = _OTHER
        return self.peak

    def passes(self, count, **sizes):
        """So many passes of the same sizes; their peaks."""
        return [self.one_pass(**sizes) for _ in range(count)]

    def held(self):
        return self.pool.usage().held_bytes


@pytest.fixture
def process(monkeypatch):
    made = Process(monkeypatch)
    yield made
    del made.pool


@pytest.mark.parametrize(
    ("forward", "more", "stays"), [(20, 8, 180), (300, 4, 0)], ids=["of backward", "of forward"]
)
def test_buffers_stay_where_backward_has_the_peak(process, forward, more, stays):
    first, *peaks = process.passes(6, forward=forward * MiB, backward=200 * MiB)
    assert max(peaks) <= first + more * MiB
    process.pool.pass_begins()
    assert process.held() >= stays * MiB, "nothing had to be mapped anew"


def test_room_is_left_for_what_is_made_while_nobody_looks(process):
    sizes = {"forward": 50 * MiB, "backward": 200 * MiB, "loss": 150 * MiB}
    first, *peaks = process.passes(6, **sizes)
    assert max(peaks) <= first + 20 * MiB  # a buffer that fits into no gap
    assert peaks[-1] <= first + 4 * MiB
    # With less at once there is room for idle buffers.
    process.passes(9, forward=50 * MiB, backward=200 * MiB)
    process.pool.pass_begins()
    assert process.held() >= 150 * MiB


def test_what_grows_into_freed_memory_needs_no_room(process):
    held = []
    for freed in (0, 100, 400):
        process.passes(9, forward=50 * MiB, backward=200 * MiB, loss=150 * MiB)
        process.freed = freed * MiB  # half of it is in parts that are too small
        process.pool.pass_begins()
        held.append(process.held() // MiB)
        process.freed = 0
    assert [each - held[0] for each in held] == [0, 50, 146]  # at last all that is idle


def test_a_pass_that_was_large_once_is_forgotten(process):
    process.one_pass(forward=400 * MiB, backward=100 * MiB)
    assert process.passes(12, forward=20 * MiB, backward=100 * MiB)[-1] <= _OTHER + 120 * MiB
    # Another that is large again finds room at once.
    assert process.one_pass(forward=400 * MiB, backward=100 * MiB) <= _OTHER + 510 * MiB


@pytest.mark.parametrize("passes", [0, 3])
def test_what_is_lent_between_two_looks_was_needed(process, passes):
    """Also if the passes before needed less."""
    process.passes(passes, forward=20 * MiB, backward=40 * MiB)
    for _ in range(2):
        process.pool.pass_begins()
        buffer = acquire(process.pool, 200 * MiB)
        del buffer  # given back before anybody looks again
        process.pool.look()
        assert process.held() >= 200 * MiB


def test_idle_memory_may_exceed_that_where_it_is_said_so(monkeypatch):
    sizes = {"forward": 300 * MiB, "backward": 200 * MiB}
    peaks, held = [], []
    for beyond in (0, 24 * MiB):
        process = Process(monkeypatch)
        process.pool.idle_may_exceed(beyond)
        process.pool.idle_may_exceed(beyond // 2)  # of somebody else: the larger one counts
        peaks.append(max(process.passes(6, **sizes)))
        process.pool.pass_begins()
        process.rest = _OTHER + 300 * MiB
        process.pool._look(acquires=True)  # forward is over
        held.append(process.held())
    assert peaks[1] <= peaks[0] + 24 * MiB
    assert held[0] + 16 * MiB <= held[1] <= held[0] + 24 * MiB


def test_a_share_of_what_the_process_needs_may_be_idle(process, monkeypatch):
    monkeypatch.setattr(pool, "IDLE_BYTES", 8 * MiB)
    process.one_pass(forward=20 * MiB, backward=300 * MiB)
    assert 180 * MiB <= process.held() <= process.peak / 4
    process.pool.keep_idle(16 * MiB)
    process.one_pass(forward=20 * MiB, backward=300 * MiB)
    assert process.held() <= 16 * MiB, "a limit that was set holds"


@pytest.mark.parametrize(("within", "excess"), [(0, 100), (200, 100), (600, 30), (2000, 0)])
def test_idle_memory_may_raise_the_peak_up_to_a_limit(monkeypatch, within, excess):
    """But for 5 % of the limit, where the process returns what it can."""
    resident = [600 * MiB, 600 * MiB, 500 * MiB]
    monkeypatch.setattr(idle, "resident_bytes", resident.pop)
    monkeypatch.setattr(idle, "_LOOK_SECONDS", 60.0)
    limit = idle.IdleLimit()
    limit.process_bytes, limit.is_scarce = within * MiB, within > 0
    limit.pass_begins()
    assert limit.excess(lambda: 0, acquires=True) == 0, "all of it is needed"
    assert limit.excess(lambda: 100 * MiB, acquires=True) == 0, "so soon nobody looks"
    limit.pass_begins()
    assert limit.excess(lambda: 100 * MiB, acquires=False) == excess * MiB
    assert limit.excess(lambda: 100 * MiB, acquires=False) == 0
    assert limit.excess(lambda: 100 * MiB, acquires=True) == excess * MiB, "forward ends"


def test_told_twice_it_is_one_pass(process):
    process.one_pass(forward=400 * MiB, backward=100 * MiB)
    for _ in range(20):  # a step ends, a forward pass begins that no backward follows, and so on
        process.pool.pass_begins()
    acquire(process.pool, 300 * MiB)
    process.pool.look()
    assert process.held() >= 200 * MiB, "what the large pass needed is remembered"


def test_before_the_first_pass_nothing_is_known(process):
    acquire(process.pool, 20 * MiB)
    process.pool._look(acquires=True)
    assert process.held() == 20 * MiB
    for _ in range(30):
        acquire(process.pool, 20 * MiB)
    process.pool.pass_begins()
    process.pool._look(acquires=True)
    assert process.held() == 0, "what was lent before counts for nothing"


def test_what_waits_raises_the_memory_in_use_by_a_half_at_most(process):
    process.pool.pass_begins()
    assert process.pool.may_wait(_OTHER // 2 - MiB)
    assert not process.pool.may_wait(_OTHER // 2 + MiB)
    # What was freed is there for it, and counts as used no longer.
    process.freed = 300 * MiB
    waiting = [process.pool.count_waiting(torch.empty(250 * MiB, dtype=torch.uint8))]
    assert process.pool.may_wait(549 * MiB)
    assert not process.pool.may_wait(551 * MiB)
    # What waits is not needed itself.
    process.freed = 0
    process.rest = _OTHER + 250 * MiB
    assert not process.pool.may_wait(1 * MiB)
    del waiting[:]
    assert process.pool.may_wait(374 * MiB)


def test_what_waits_stays_below_the_limit_of_the_process(process):
    process.pool.limit_process(lambda: _OTHER * 4 // 3 + MiB, is_scarce=False)
    process.pool.pass_begins()
    assert process.pool.may_wait(0)
    assert not process.pool.may_wait(2 * MiB), "three quarters are used"
    process.freed = _OTHER
    process.pool.limit_process(lambda: _OTHER, is_scarce=False)
    process.pool.pass_begins()
    assert process.pool.may_wait(_OTHER // 2), "freed memory has a place for it"
    assert not process.pool.may_wait(_OTHER // 2 + MiB), "parts of freed memory are too small"
    process.freed = 0
    assert not process.pool.may_wait(1 * MiB), "the process is as large as it may be"


def test_where_memory_is_scarce_what_waits_may_use_most_of_the_limit(process):
    process.pool.limit_process(lambda: _OTHER * 2, is_scarce=True)
    process.pool.limit_process(lambda: _OTHER * 2, is_scarce=False)  # by another client
    process.pool.pass_begins()
    assert process.pool.may_wait(_OTHER * 7 // 10 - MiB)
    assert not process.pool.may_wait(_OTHER * 7 // 10 + MiB)


def test_how_much_may_wait_is_not_measured_for_each_tensor(process, monkeypatch):
    monkeypatch.setattr(idle, "_ROOM_SECONDS", 60.0)
    process.pool.limit_process(lambda: _OTHER * 2, is_scarce=True)
    process.pool.pass_begins()
    assert process.pool.may_wait(_OTHER // 2)
    process.rest = 0  # which would be seen if it was measured again
    assert not process.pool.may_wait(_OTHER // 2), "the first one is there"
    assert process.pool.may_wait(_OTHER // 5 - MiB)


def test_idle_memory_stays_beside_what_waits(process):
    process.passes(3, forward=300 * MiB, backward=200 * MiB)
    process.pool.pass_begins()
    process.rest = _OTHER + 300 * MiB
    acquire(process.pool, 20 * MiB)
    waiting = process.pool.count_waiting(torch.empty(200 * MiB, dtype=torch.uint8))
    process.rest = _OTHER + 100 * MiB + waiting.nbytes
    process.pool.look()
    assert process.held() >= 20 * MiB


# ---------------------------------------------------------------------- close to a limit
class NearLimit:
    """A process with a limit of 1000 MiB, a clock of its own, and memory that returning leaves."""

    def __init__(self, monkeypatch):
        self.now = self.resident = self.returned = 0
        self.leaves = 700
        monkeypatch.setattr(idle, "resident_bytes", lambda: self.resident * MiB)
        monkeypatch.setattr(idle, "perf_counter", lambda: self.now)
        monkeypatch.setattr(idle.freed_memory, "return_all", self.return_all)
        self.trimming = idle.TrimmingNearLimit(1000 * MiB)

    def return_all(self):
        self.now += 0.02
        self.resident, self.returned = self.leaves, self.returned + 1

    def returns(self, *sizes, after=0.002):
        """Look at these sizes, one after the other; return how often memory was returned."""
        before = self.returned
        for self.resident in sizes:
            self.now += after
            self.trimming.look()
        return self.returned - before


def test_freed_memory_is_returned_close_to_a_limit(monkeypatch):
    process = NearLimit(monkeypatch)
    assert process.returns(800, 951, after=0.0006) == 0, "more often is of no use"
    assert process.returns(*range(800, 950, 10)) == 0
    assert process.returns(951) == 1
    assert process.returns(951) == 1, "and again, if that has helped"


def test_freed_memory_is_returned_earlier_where_memory_grows_fast(monkeypatch):
    process = NearLimit(monkeypatch)
    assert process.returns(600, 690, 800, 895) == 0, "110 MiB may come at once"
    assert process.returns(901) == 1
    assert process.returns(*[700] * 20_000, *range(700, 940, 10)) == 0, "that was long ago"


def test_memory_that_cannot_be_returned_is_not_looked_for_again_and_again(monkeypatch):
    process = NearLimit(monkeypatch)
    process.leaves = 955
    assert process.returns(*[955] * 100) == 1
    assert process.returns(955, after=0.4) == 1, "a twentieth of the time"


# ---------------------------------------------------------------------- what cannot be read
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), psutil.AccessDenied()]
)
@pytest.mark.parametrize(
    ("read", "source"),
    [
        (memory_limits.resident_bytes, "_process"),
        (memory_limits.available_bytes, "psutil.virtual_memory"),
    ],
)
def test_a_figure_that_cannot_be_read_is_what_it_was_last(read, source, error, monkeypatch):
    monkeypatch.setattr(memory_limits, "_latest", {})
    with monkeypatch.context() as patch:
        patch.setattr(f"offload_strategy.host_memory.memory_limits.{source}", raising(error))
        with pytest.raises(OffloadError, match=r"host memory of the system .*ulimit -n"):
            read()
    before = read()
    assert before > 0
    monkeypatch.setattr(f"offload_strategy.host_memory.memory_limits.{source}", raising(error))
    assert read() == pytest.approx(before, rel=0.1)
