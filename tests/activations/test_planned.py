"""A limit of memory, and the plan that keeps to it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.pass_profile import IoOverhead, PassProfiler
from offload_strategy.activations.planned_budget import MemoryLimit, PlannedBudget
from offload_strategy.plan_runtime.lifetime_plan import CHECKPOINT, GivenPlan, PlannedItem
from offload_strategy.units import MiB

LAYERS, ITEM = 10, 100 * MiB
WAIT_SECONDS = 0.005


class TierLoad:
    """A path that has written all at once, or nothing."""

    def __init__(self, rate: float | None = 400.0 * MiB) -> None:
        self._rate = rate
        self.writing = self.idle = 0
        self.waits: list[int] = []

    def release_written(self) -> None:
        pass

    def keep_idle_buffers(self, nbytes: int) -> None:
        self.idle = nbytes

    def leaving_bytes(self) -> int:
        return self.writing

    def release_at_least(self, nbytes: int, seconds: float) -> None:
        at_most = max(0, self.writing - nbytes)
        if self.writing > at_most:
            self.waits.append(at_most)
            self.writing = at_most
            time.sleep(WAIT_SECONDS)

    def rate(self, *, write: bool) -> float | None:
        return self._rate


class Memory:
    """Of a training that has so much in memory beside its items."""

    counts_host_buffers = resets = True

    def __init__(self, others: int) -> None:
        self.others = others
        self.items = self._peak = 0

    def change(self, nbytes: int) -> None:
        self.items += nbytes
        self._peak = max(self._peak, self.others + self.items)

    def needs_for_a_moment(self, nbytes: int) -> None:
        self.change(nbytes)
        self.change(-nbytes)

    def reset_peak(self) -> None:
        self._peak = self.others + self.items

    def peak_bytes(self) -> int:
        return max(self._peak, self.others + self.items)

    def used_bytes(self) -> int:
        return self.others + self.items

    def total_bytes(self) -> int:
        return 4 * self.others


def training(
    limit: int | None, others: int = 500 * MiB, *, passes: int = 2, rate: float | None = 400.0 * MiB
) -> tuple[PlannedBudget, TierLoad, Memory]:
    tier_load, memory = TierLoad(rate), Memory(others)
    budget = PlannedBudget(MemoryLimit(limit, passes, memory), PassProfiler(tier_load))
    return budget, tier_load, memory


def planned(limit: int | None = 1000 * MiB, **options: Any) -> tuple[PlannedBudget, Memory]:
    """A training that has its first plan."""
    budget, _, memory = training(limit, **options)
    for _ in range(3):
        one_pass(budget, memory)
    return budget, memory


def one_pass(budget: PlannedBudget, memory: Memory, kinds: str = "a" * LAYERS) -> list[bool]:
    """A forward pass of one second a layer and its backward; what left of it."""
    trace, storages = forward(budget, memory, kinds)
    left = [storage is None for storage in storages]
    backward(budget, memory, trace, storages)
    return left


Storages = list[torch.UntypedStorage | None]


def forward(
    budget: PlannedBudget, memory: Memory, kinds: str, nbytes: int = ITEM
) -> tuple[Trace, Storages]:
    trace = Trace()
    trace.started_at = 0.0
    storages: Storages = []
    for number, kind in enumerate(kinds):
        memory.change(nbytes)
        trace.saved_bytes += nbytes
        trace.saved(hash((trace.signature, kind)), nbytes)
        trace.saved_at[-1] = number + 1.0
        storages.append(torch.UntypedStorage(1))
        trace.watch(number, storages[-1], nbytes)
        if budget.admits(nbytes, trace, None):
            storages[-1] = None
            memory.change(-nbytes)
            trace.left_bytes += nbytes
    return trace, storages


def backward(budget: PlannedBudget, memory: Memory, trace: Trace, storages: Storages) -> None:
    for number in reversed(range(len(storages))):
        if storages[number] is None:
            memory.change(ITEM)
        trace.used(number)
        seconds = len(storages) + 2.0 * len(trace.uses)
        trace.uses[-1] = (number, seconds, 0.0)
        budget.uses(trace, 0, ITEM)
        storages[number] = None
        memory.change(-ITEM)
    budget.observe(trace)
    budget.learn(trace)


def test_all_leaves_until_there_is_a_plan_and_then_what_must() -> None:
    budget, _, memory = training(limit=1000 * MiB)
    assert all(one_pass(budget, memory))
    assert all(one_pass(budget, memory))
    left = one_pass(budget, memory)
    assert budget.plan is not None
    assert budget.plan.hidden
    # 985 MiB less the 500 beside them: four items of 100 MiB may stay, those that are used first.
    assert left == [True] * 6 + [False] * 4
    assert memory.peak_bytes() <= 1000 * MiB
    assert budget.deviations == 0


def test_a_step_that_needs_more_beside_its_items_leaves_them_less() -> None:
    budget, memory = planned()
    memory.others += 150 * MiB
    one_pass(budget, memory)
    left = one_pass(budget, memory)
    assert memory.peak_bytes() <= 1000 * MiB
    assert left.count(False) == 3
    assert budget.over_limit_passes == 0, "it was seen before anything was saved"


def test_a_step_that_needs_more_for_a_moment_leaves_its_items_less() -> None:
    budget, memory = planned()
    for times in range(3):
        trace, storages = forward(budget, memory, "a" * LAYERS)
        memory.needs_for_a_moment(150 * MiB)
        backward(budget, memory, trace, storages)
        assert budget.over_limit_passes == (times > 0)
    assert one_pass(budget, memory).count(False) == 3


def test_what_comes_after_backward_needs_no_item_to_leave() -> None:
    budget, _, memory = training(limit=1000 * MiB)
    for _ in range(3):
        one_pass(budget, memory)
        memory.needs_for_a_moment(450 * MiB)  # in the optimizer's step
    assert one_pass(budget, memory).count(False) == 4


def test_passes_without_a_backward_do_not_make_the_room_smaller() -> None:
    budget, memory = planned()
    for _ in range(5):  # evaluation with gradients enabled
        forward(budget, memory, "a" * LAYERS)
        memory.needs_for_a_moment(700 * MiB)  # what it computes beside its graph
        memory.change(-memory.items)
    for _ in range(2):
        assert one_pass(budget, memory).count(False) == 4


def test_training_waits_for_room_and_its_plan_knows_no_waiting() -> None:
    budget, tier_load, _ = training(limit=700 * MiB)
    tier_load.writing = 300 * MiB
    trace = Trace()
    trace.saved_bytes += ITEM
    trace.saved(1, ITEM)
    # What an earlier item of it weighs is still on its way.
    storages = [torch.UntypedStorage(1) for _ in range(2)]
    for number, storage in enumerate(storages):
        trace.watch(number, storage, (1 + 2 * number) * ITEM)
    begin = time.perf_counter()
    budget.admits(ITEM, trace, None)
    assert len(tier_load.waits) == 1
    assert tier_load.writing <= 300 * MiB - ITEM
    assert WAIT_SECONDS <= trace.held <= time.perf_counter() - begin


def test_a_pass_that_looks_unlike_any_other_leaves_and_is_counted() -> None:
    budget, _, memory = training(limit=1000 * MiB)
    for _ in range(5):
        one_pass(budget, memory)
    left = one_pass(budget, memory, "aaaab" + "a" * 5)
    assert left == [True] * 10
    assert budget.deviations == 6
    # That pass has a plan from now on, and the other one keeps its own.
    stayed = [one_pass(budget, memory, "aaaab" + "a" * 5).count(False) for _ in range(3)]
    assert stayed == [3, 4, 4], "it was looked at closely"
    assert one_pass(budget, memory).count(False) == 4


def test_longer_sequences_than_planned_for_leave_what_should_have_stayed() -> None:
    budget, memory = planned()
    trace, _ = forward(budget, memory, "a" * LAYERS, 2 * ITEM)
    assert trace.saved_bytes - trace.left_bytes <= 485 * MiB
    assert budget.deviations == 2


def test_a_limit_that_cannot_be_kept_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    budget, _, memory = training(limit=510 * MiB)
    with caplog.at_level(logging.WARNING, logger="offload_strategy"):
        for _ in range(5):
            one_pass(budget, memory)
    told = [record for record in caplog.records if "cannot be kept" in record.message]
    assert len(told) == 1
    assert CHECKPOINT in told[0].message
    assert all(one_pass(budget, memory)), "everything leaves"


@pytest.mark.parametrize(("rate", "slow"), [(400.0 * MiB, False), (10.0 * MiB, True)])
def test_a_path_that_is_too_slow_is_told_with_what_helps(
    rate: float, slow: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="offload_strategy"):
        planned(700 * MiB, rate=rate)
    assert (CHECKPOINT in caplog.text) is slow


def test_without_a_limit_what_there_is_counts() -> None:
    budget, memory = planned(None)  # 95 % of 2000 MiB
    assert not any(one_pass(budget, memory))
    assert budget.figures()["plan_limit_bytes"] == int(0.95 * 2000 * MiB)


def test_a_path_that_was_never_busy_is_taken_for_as_fast_as_it_was_seen() -> None:
    budget, _ = planned(rate=None)
    assert budget.profile is not None
    assert budget.profile.paths[0].write == pytest.approx(2 * LAYERS * ITEM / 30.0, rel=1e-3)


# ---------------------------------------------------------------- a plan from a file
def with_file(limit: int, *leaves: bool, nbytes: int = ITEM) -> tuple[PlannedBudget, Memory]:
    budget, _, memory = training(limit)
    words = ["leaves" if one else "stays" for one in leaves]
    items = (PlannedItem(number, nbytes, word) for number, word in enumerate(words))
    budget._memory.given = GivenPlan(tuple(items))
    return budget, memory


def test_what_a_file_says_holds_from_the_first_pass() -> None:
    budget, memory = with_file(2000 * MiB, *[True, False] * (LAYERS // 2))
    for _ in range(5):
        assert one_pass(budget, memory) == [True, False] * (LAYERS // 2)
    assert budget.deviations == 0


def test_a_file_does_not_break_the_limit() -> None:
    budget, memory = with_file(1000 * MiB, *[False] * LAYERS)
    for _ in range(4):
        one_pass(budget, memory)
    assert one_pass(budget, memory).count(False) == 4
    assert memory.peak_bytes() <= 1000 * MiB
    assert budget.deviations > 0


def test_what_a_file_does_not_know_goes_by_the_plan_that_is_found() -> None:
    budget, memory = with_file(2000 * MiB, *[True] * (LAYERS + 1), nbytes=ITEM + 1)
    for _ in range(3):
        one_pass(budget, memory)
    assert not any(one_pass(budget, memory))


# ---------------------------------------------------------------- overhead of I/O
SAVED = 1000 * MiB


def overhead(*passes: tuple[int, float], held: float = 0.0, kind: int = 7) -> float:
    """Seconds per byte, learned from passes of so many offloaded bytes and seconds."""
    io_overhead = IoOverhead()
    for number, (left, seconds) in enumerate([(0, 99.0), *passes]):  # the first warms up
        trace = Trace(saved_bytes=SAVED, left_bytes=left)
        last = number == len(passes)
        trace.held = held if last else 0.0
        trace.prefixes = [kind if last else 7]
        trace.uses = [(0, trace.started_at + seconds + trace.held, 0.0)]
        io_overhead.observe(trace)
    return io_overhead.per_byte


def test_overhead_is_the_slope_of_computing_over_what_is_moved() -> None:
    assert overhead((SAVED, 3.0), (SAVED, 3.0), (0, 2.0)) == pytest.approx(1.0 / (2 * SAVED))
    assert overhead() == 0
    # Passes that move nearly the same, of another kind, and waits do not count.
    assert overhead((SAVED, 3.0), (SAVED, 3.1), (int(0.9 * SAVED), 2.0)) == 0
    assert overhead((SAVED, 3.0), (0, 1.0), kind=8) == 0
    assert overhead((0, 2.0), (SAVED, 2.0), held=5.0) == pytest.approx(0.0)
    # A disturbance is bounded, and one slow pass of many does not decide.
    assert overhead((SAVED, 1000.0), (0, 2.0)) == 3e-9
    assert overhead((SAVED, 1.0), (0, 2.0)) == 0
    noisy = [(SAVED, 3.01), (SAVED, 2.99), (SAVED, 9.0), (SAVED, 3.0), (0, 2.0), (0, 2.01)]
    assert overhead(*noisy) == pytest.approx(1.0 / (2 * SAVED), rel=0.1)


def test_idle_buffers_stay_mapped_as_far_as_the_last_steps_leave_room_below_the_limit() -> None:
    budget, load, memory = training(1000 * MiB)
    for _ in range(3):
        one_pass(budget, memory, "aaa")
    assert load.idle == 0, "there was no plan"
    one_pass(budget, memory, "aaa")
    assert load.idle == int(0.85 * 1000 * MiB) - budget.latest_peak_bytes > 0
    for _ in range(9):
        one_pass(budget, memory, "aaa")
    assert load.idle == 250 * MiB
    memory.others += 150 * MiB
    for _ in range(4):
        one_pass(budget, memory, "aaa")
    assert load.idle == 0


def test_a_step_that_was_seen_within_the_limit_is_not_measured_although_less_was_certain() -> None:
    budget, _, memory = training(1000 * MiB, others=400 * MiB)
    limit, steps = budget._memory, 0
    limit.upcoming_bytes = lambda: 200 * MiB  # of which nothing comes
    limit.steps = lambda: steps

    def step() -> bool:
        nonlocal steps
        one_pass(budget, memory, "a")
        steps += 1
        return budget.limit_bytes > 0  # whether it is measured from event to event

    assert not step(), "150 MiB are certain, and 100 are saved"
    memory.others += 100 * MiB  # what the allocator keeps, of which nobody knows beforehand
    assert not any(step() for _ in range(3))
    memory.others += 350 * MiB
    step()
    assert step(), "the last one was too close to the limit"
