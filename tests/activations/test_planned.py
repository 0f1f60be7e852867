"""A limit of memory and the plan that keeps to it, in a simulated training; what moving costs."""

import logging
import time
from unittest.mock import Mock, call

import pytest
import torch

from offload_strategy.activations import planned_budget
from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.pass_profile import IoOverhead, PassProfiler
from offload_strategy.activations.planned_budget import MemoryLimit, PlannedBudget
from offload_strategy.plan_runtime import lifetime_plan as plans
from offload_strategy.units import MiB

LAYERS, ITEM = 10, 100 * MiB
WAIT_SECONDS = 0.005


# ---------------------------------------------------------------- a simulated training
class Training:
    """Passes of one second a layer; items of the same kind have the same letter.

    It is its own meter of memory, of which `others` is not of items, and its own path, which has
    written everything but `writing` at once.
    """

    counts_host_buffers = resets = True
    #: Whether the memory of freed items stays in the peak until it is returned, and is known.
    counts_freed = False

    def __init__(self, limit=1000 * MiB, others=500 * MiB, *, speed=400.0 * MiB, passes=0, file=()):
        self.others, self.speed = others, speed
        self.items = self.peak = self.writing = self.waits = self.freed = self.waiting_bytes = 0
        self.idle, self.idle_buffers, self.process_limit = 0, 0, (0, False)
        # Bytes that may wait, and do from each use of an item until the next pass begins.
        self.waits_from_use = 0
        self.store = self.registry = self.pool = self
        self.limit = MemoryLimit(limit, 2, self, plans.GivenPlan(tuple(file)) if file else None)
        self.budget = PlannedBudget(self.limit, PassProfiler(self))
        for _ in range(passes):
            self.step()

    def used_bytes(self):
        return self.others + self.items + self.waiting_bytes

    needed_bytes = used_bytes

    def peak_bytes(self):
        return max(self.peak, self.used_bytes() + self.freed + self.idle_buffers)

    def reset_peak(self):
        self.peak = self.used_bytes() + self.freed + self.idle_buffers

    def return_freed(self, beyond):
        if self.freed > beyond:
            self.freed = 0

    def default_limit_bytes(self, processes):
        return int(0.95 * 4 * self.others)

    def change(self, nbytes):
        self.items += nbytes
        if self.counts_freed:
            self.freed = max(0, self.freed - nbytes)
        self.peak = self.peak_bytes()

    def needs_for_a_moment(self, nbytes):
        self.change(nbytes)
        self.change(-nbytes)

    def release_written(self):
        pass

    def keep_idle(self, nbytes):
        self.idle = nbytes

    def trim(self, keep):
        self.idle_buffers = min(keep, self.idle_buffers)

    def limit_process(self, nbytes, *, is_scarce):
        self.process_limit = nbytes(), is_scarce

    def leaving_bytes(self):
        return self.writing

    def release_at_least(self, nbytes):
        if self.writing and nbytes > 0:
            self.writing = max(0, self.writing - nbytes)
            self.waits += 1
            time.sleep(WAIT_SECONDS)

    def rate(self, *, write):
        return self.speed

    def has_room_in_memory(self, nbytes):
        return False

    def step(self, kinds="a" * LAYERS):
        """A forward pass and its backward; what stayed of it."""
        trace, storages = self.forward(kinds)
        stayed = [storage is not None for storage in storages]
        self.backward(trace, storages)
        return stayed

    def forward(self, kinds="a" * LAYERS, nbytes=ITEM):
        trace, storages = Trace(started_at=0.0), []
        for number, kind in enumerate(kinds):
            self.change(nbytes)
            trace.saved_bytes += nbytes
            trace.saved(hash((trace.signature, kind)), nbytes)
            trace.saved_at[-1] = number + 1.0
            storages.append(torch.UntypedStorage(1))
            trace.watch(number, storages[-1], nbytes)
            if self.budget.admits(nbytes, trace, None):
                storages[-1] = None
                self.change(-nbytes)
                trace.left_bytes += nbytes
        return trace, storages

    def backward(self, trace, storages):
        for number in reversed(range(len(storages))):
            if storages[number] is None:
                self.change(ITEM)
            trace.used(number)
            trace.uses[-1] = (number, len(storages) + 2.0 * len(trace.uses), 0.0)
            self.budget.uses(trace, 0, ITEM)
            storages[number] = None
            self.change(-ITEM)
            self.waiting_bytes += self.waits_from_use
            self.peak = self.peak_bytes()
        self.budget.observe(trace)
        self.budget.learn(trace)
        self.waiting_bytes = 0


# ---------------------------------------------------------------- what stays
def test_all_leaves_until_there_is_a_plan_and_then_what_must():
    training = Training()
    assert not any(training.step())
    assert training.budget.figures()["plan_peak_bytes"] == 600 * MiB
    assert not any(training.step())
    # 985 MiB less the 500 beside them: four items of 100 MiB may stay, those that are used first.
    assert training.step() == [False] * 6 + [True] * 4
    assert training.budget.plan is not None
    assert training.budget.plan.hidden
    assert training.budget.profile.forward_seconds < training.budget.profile.step_seconds
    assert training.budget.profile.other_bytes == 600 * MiB, "with an item that is leaving"
    assert training.peak_bytes() <= 1000 * MiB
    assert training.budget.deviations == 0


def test_a_step_that_needs_more_beside_its_items_leaves_them_less():
    training, trace = Training(passes=5), Trace(sizes=[ITEM])
    assert training.budget.room(trace) == 385 * MiB
    training.others += 150 * MiB
    training.step()
    assert sum(training.step()) == 3
    assert training.budget.room(trace) == 235 * MiB
    assert training.peak_bytes() <= 1000 * MiB
    assert training.budget.over_limit_passes == 0, "it was seen before anything was saved"


# The fourth pass, the first with a plan, is looked at closely: what was needed before may be over.
@pytest.mark.parametrize("passes", [0, 3, 5])
def test_a_step_that_needs_more_for_a_moment_leaves_its_items_less(passes):
    training = Training(passes=passes)
    for times in range(3):
        trace, storages = training.forward()
        training.needs_for_a_moment(150 * MiB)
        training.backward(trace, storages)
        assert training.budget.over_limit_passes == (passes > 0 and times > 0)
    assert [sum(training.step()) for _ in range(2)] == [3, 3 if passes else 4]


def test_there_is_no_plan_until_the_times_of_such_a_pass_are_known():
    training = Training()
    training.step("bbb")
    training.budget.learn = lambda trace: None
    assert not any(sum(training.step()) for _ in range(4))


def test_what_comes_after_backward_needs_no_item_to_leave():
    training = Training()
    for _ in range(3):
        training.step()
        training.needs_for_a_moment(450 * MiB)  # in the optimizer's step
    assert sum(training.step()) == 4


def test_memory_of_freed_tensors_that_is_kept_is_not_needed(monkeypatch):
    monkeypatch.setattr(Training, "counts_freed", True)
    training = Training()
    for _ in range(4):
        training.step()
        training.needs_for_a_moment(450 * MiB)  # which the C library keeps
    assert [sum(training.step()) for _ in range(3)] == [3, 3, 3], "of 880 MiB"
    assert training.freed > 300 * MiB
    # It is in the next peak, which is predicted with it.
    other = Training(others=100 * MiB)
    for times in range(7):
        other.freed = (times > 4) * 600 * MiB
        other.step("aaa")
    assert other.budget.figures()["plan_peak_bytes"] == 700 * MiB
    assert other.budget.figures()["plan_kept_bytes"] == 300 * MiB
    # With so much in use that even without it the process comes too close to its limit:
    training.others += 150 * MiB
    training.step()
    assert sum(training.step()) == 2


# A process may come to 98 % of its limit by what grows between two looks, however little it needs.
@pytest.mark.parametrize(("at_once", "stay"), [(470 * MiB, 3), (490 * MiB, 2)])
def test_what_comes_close_to_the_limit_leaves_items_less_only_if_it_is_too_close(
    at_once, stay, monkeypatch
):
    monkeypatch.setattr(Training, "counts_freed", True)
    training = Training(passes=4)
    for _ in range(12):
        training.step()
        training.needs_for_a_moment(at_once)
    assert sum(training.step()) == stay


@pytest.mark.parametrize("counts_freed", [False, True])
def test_the_first_pass_with_a_plan_is_measured_again_only_if_that_is_cheap(
    counts_freed, monkeypatch
):
    monkeypatch.setattr(Training, "counts_freed", counts_freed)
    training, returns, returned = Training(), [], []
    training.return_freed = returns.append
    for _ in range(5):
        returns.clear()
        training.step()
        returned.append(bool(returns))
    assert training.budget.plan is not None
    assert returned == [True, True, False, not counts_freed, False]


# A quarter of what is in use (600 MiB with the first item) may be idle buffers, freed memory none.
@pytest.mark.parametrize(("unused", "usual"), [("freed", 0), ("idle_buffers", 150 * MiB)])
def test_unused_memory_is_not_measured_however_far_the_limit_is(unused, usual, monkeypatch):
    monkeypatch.setattr(Training, "counts_freed", True)
    measured = []
    for nbytes in (usual, 300 * MiB):
        training = Training(20_000 * MiB)
        setattr(training, unused, nbytes)
        for _ in range(6):
            training.step()
        measured.append(training.budget.profile.other_bytes)
    assert measured[0] == measured[1]


@pytest.mark.parametrize("keeps_freed", [False, True])
def test_a_profile_tells_whether_its_memory_keeps_freed_tensors(keeps_freed, monkeypatch):
    monkeypatch.setattr(Training, "counts_freed", False)

    def turn_caches_off():  # only then it is known how much there is
        Training.counts_freed = keeps_freed

    monkeypatch.setattr(planned_budget, "reuse_freed_memory", turn_caches_off)
    training = Training(passes=4)
    assert training.budget.profile.keeps_freed == keeps_freed
    assert training.budget.usable_bytes == (880 if keeps_freed else 985) * MiB


@pytest.mark.parametrize("room", [False, True])
def test_a_plan_goes_by_the_link_if_what_leaves_stays_in_host_memory(room, monkeypatch):
    """And by the paths, which are slower, if it does not."""
    monkeypatch.setattr(Training, "has_room_in_memory", lambda *_: room)
    monkeypatch.setattr(Training, "copy_rate", lambda _: 7e9, raising=False)
    [path] = Training(speed=400.0 * MiB, passes=4).budget.profile.paths
    assert path.read == path.write == (7e9 if room else 400 * MiB)


def test_what_waits_in_memory_because_there_is_room_makes_no_item_leave():
    training = Training()
    training.waits_from_use = 40 * MiB
    assert [sum(training.step()) for _ in range(5)] == [0, 0, 4, 4, 4]
    training.waits_from_use = 0
    assert [sum(training.step()) for _ in range(2)] == [4, 4]
    # At this moment it takes room, all the same.
    trace = Trace(sizes=[ITEM])
    room = training.budget.room(trace)
    training.waiting_bytes = 20 * MiB
    assert training.budget.room(trace) == room - 20 * MiB


def test_passes_without_a_backward_do_not_make_the_room_smaller():
    training = Training(passes=3)
    for _ in range(5):  # evaluation with gradients enabled
        training.forward()
        training.needs_for_a_moment(700 * MiB)  # what it computes beside its graph
        training.change(-training.items)
    assert [sum(training.step()) for _ in range(2)] == [4, 4]


def test_training_waits_for_room_and_its_plan_knows_no_waiting():
    training, trace = Training(limit=700 * MiB), Trace()
    training.writing = 300 * MiB
    trace.saved_bytes += ITEM
    trace.saved(1, ITEM)
    storage = torch.UntypedStorage(1)
    trace.watch(0, storage, 4 * ITEM)  # with earlier items, which are still on their way
    begin = time.perf_counter()
    training.budget.admits(ITEM, trace, None)
    assert training.budget.must_leave(trace) == 300 * MiB - training.writing
    assert training.waits == 1
    assert training.writing <= 300 * MiB - ITEM
    assert WAIT_SECONDS <= trace.held <= time.perf_counter() - begin


def test_a_pass_that_looks_unlike_any_other_leaves_and_is_counted():
    training, other = Training(passes=5), "aaaab" + "a" * 5
    assert not any(training.step(other))
    assert training.budget.deviations == 6
    # That pass has a plan from now on, and the other one keeps its own.
    assert [sum(training.step(other)) for _ in range(3)] == [3, 4, 4], "it was looked at closely"
    assert sum(training.step()) == 4


def test_longer_sequences_than_planned_for_leave_what_should_have_stayed():
    training = Training(passes=3)
    trace, _ = training.forward(nbytes=2 * ITEM)
    assert trace.saved_bytes - trace.left_bytes <= 485 * MiB
    assert training.budget.deviations == 2


def test_a_limit_that_cannot_be_kept_is_told_once(caplog):
    with caplog.at_level(logging.WARNING, logger="offload_strategy"):
        training = Training(limit=110 * MiB, others=100 * MiB, passes=5)
    (told,) = (message for message in caplog.messages if "cannot be kept" in message)
    assert plans.CHECKPOINT in told
    assert not any(training.step()), "everything leaves"


@pytest.mark.parametrize(("speed", "slow"), [(400.0 * MiB, False), (10.0 * MiB, True)])
def test_a_path_that_is_too_slow_is_told_with_what_helps(speed, slow, caplog):
    with caplog.at_level(logging.INFO, logger="offload_strategy"):
        Training(700 * MiB, speed=speed, passes=3)
    assert (plans.CHECKPOINT in caplog.text) is slow


def test_without_a_limit_what_there_is_counts_and_an_idle_path_is_as_fast_as_it_was_seen():
    training = Training(None, speed=None, passes=3)  # 95 % of 2000 MiB
    assert all(training.step())
    assert training.budget.figures()["plan_limit_bytes"] == int(0.95 * 2000 * MiB)
    assert training.budget.profile is not None
    seen = 2 * LAYERS * ITEM / 30.0
    assert training.budget.profile.paths[0].write == pytest.approx(seen, rel=1e-3)


def test_an_eighth_of_the_limit_may_be_idle_buffers_from_the_first_measured_pass_on(monkeypatch):
    training, freed = Training(), Mock()
    monkeypatch.setattr(planned_budget, "freed_memory", freed)
    assert (training.idle, training.process_limit) == (0, (0, False)), "nothing was measured"
    training.step("aaa")
    assert (training.idle, training.process_limit) == (125 * MiB, (1000 * MiB, True))
    training.step("aaa")
    assert freed.mock_calls == [call.return_all(), *2 * [call.note_reuse()]], "before backward"


@pytest.mark.parametrize(("keeps_freed", "seen"), [(False, 300), (True, 350)])
def test_a_step_that_was_seen_within_the_limit_is_not_measured(keeps_freed, seen, monkeypatch):
    monkeypatch.setattr(Training, "counts_freed", keeps_freed)
    training, steps, looks = Training(others=400 * MiB), 0, []
    training.limit.upcoming_bytes = lambda: 200 * MiB  # of which nothing comes
    monkeypatch.setattr(planned_budget.TrimmingNearLimit, "look", lambda _: looks.append(0))
    training.limit.steps = lambda: steps

    def step():
        nonlocal steps
        training.step("a")
        steps += 1
        return training.budget.limit_bytes > 0  # whether it is measured from event to event

    assert not step(), "150 MiB are certain, and 100 are saved"
    training.others += 100 * MiB  # what the allocator keeps, which nobody knows beforehand
    assert not any(step() for _ in range(3))
    training.others += seen * MiB  # more where the C library keeps what may be returned
    assert not any(step() for _ in range(2))
    training.others += MiB
    step()
    assert step(), "the last one was too close to the limit"
    assert len(looks) == 2 * steps, "whether freed memory is to be returned"


@pytest.mark.parametrize(("nbytes", "most"), [(1, 512), (ITEM, 8)])
def test_a_pass_looks_ahead_over_more_items_if_they_are_small(nbytes, most, monkeypatch):
    training, looked = Training(passes=3), []
    monkeypatch.setattr(training.budget._baseline, "after", lambda e: looked.append(e) or 0)
    training.budget.must_leave(Trace(sizes=[nbytes] * 1000))
    assert len(looked) == most


def test_a_plan_from_a_file_holds_from_the_first_pass_as_far_as_limit_and_sizes_allow():
    items = [plans.PlannedItem(n, ITEM, "stays" if n % 2 else "leaves") for n in range(LAYERS)]
    training = Training(2000 * MiB, file=items)
    assert [training.step() for _ in range(5)] == [[False, True] * (LAYERS // 2)] * 5
    assert training.budget.deviations == 0

    items = [plans.PlannedItem(number, ITEM, "stays") for number in range(LAYERS)]
    training = Training(1000 * MiB, passes=4, file=items)
    assert sum(training.step()) == 4
    assert training.peak_bytes() <= 1000 * MiB
    assert training.budget.deviations > 0

    # Items of other sizes go by the plan that is found.
    items = [plans.PlannedItem(number, ITEM + 1, "leaves") for number in range(LAYERS + 1)]
    assert all(Training(2000 * MiB, passes=3, file=items).step())


# ---------------------------------------------------------------- what moving a byte costs
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
