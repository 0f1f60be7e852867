"""How much leaves, by what a path can hide and its drives may take, and what is fetched ahead."""

import logging

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from offload_strategy import OffloadConfig
from offload_strategy.activations import budgets
from offload_strategy.activations.budgets import (
    ALLOWANCE,
    AutomaticBudget,
    Budget,
    FreeMemory,
)
from offload_strategy.activations.forward_records import Trace
from offload_strategy.activations.planned_budget import MemoryLimit
from offload_strategy.activations.prefetch import UseOrderHistory
from offload_strategy.engine import metrics as engine_metrics
from offload_strategy.units import GiB, MiB
from tests.activations.support import noise
from tests.training import (
    Block,
    activations_only,
    assert_same_history,
    attached,
    backward_history,
    on_disk,
    same_with_and_without,
    settings,
)


# ---------------------------------------------------------------------- the automatic budget
class SlowPath:
    """A path that takes what it is told to."""

    def __init__(self, waiting=0, write=None, read=None, memory=0, clears=False):
        self.waiting, self.write, self.read, self.memory = waiting, write, read, memory
        self.clears, self.waits = clears, []
        self.store = self.registry = self

    writing_bytes = property(lambda self: self.waiting)

    def rate(self, *, write):
        return self.write if write else self.read

    def has_room_in_memory(self, nbytes):
        return nbytes <= self.memory

    def await_writes(self, client, nbytes, seconds):
        self.waits.append(seconds)
        if self.clears:
            self.waiting = min(self.waiting, nbytes)


def step(saved, left, waited=0.0):
    """A step of ten seconds that is over."""
    uses = [(0, 10.0, waited)]
    return Trace(started_at=0.0, saved_bytes=saved, left_bytes=left, waited=waited, uses=uses)


def offer(budget, nbytes, trace, idle=None):
    """As the pack hook does."""
    trace.saved_bytes += nbytes
    if budget.admits(nbytes, trace, idle):
        trace.left_bytes += nbytes
        return True
    return False


def test_a_path_that_is_behind_gets_no_more():
    path, trace = SlowPath(), Trace()
    budget = AutomaticBudget(path, GiB)
    assert all(offer(budget, 10 * MiB, trace) for _ in range(100))
    path.waiting = 60 * MiB
    assert not offer(budget, 10 * MiB, trace)
    assert path.waits == []  # nothing is known yet of how long a step takes
    path.waiting = 50 * MiB
    assert offer(budget, 10 * MiB, trace)


def test_a_little_may_be_waited_for_once_the_time_of_a_step_is_known():
    path, trace = SlowPath(clears=True), Trace()
    budget = AutomaticBudget(path, GiB)
    budget.learn(step(GiB, GiB))
    assert offer(budget, 10 * MiB, trace)
    path.waiting = 500 * MiB
    assert offer(budget, 10 * MiB, trace)
    assert path.waits == [pytest.approx(10.0 * ALLOWANCE)]


def test_host_memory_takes_whatever_the_path_is_doing():
    path, trace = SlowPath(waiting=GiB, memory=MiB), Trace()
    budget = AutomaticBudget(path, 16 * MiB)
    assert offer(budget, MiB, trace)
    assert not offer(budget, 2 * MiB, trace)
    # What waits to be written is bounded by the memory that is allowed.
    budget.learn(step(GiB, GiB))
    path.waiting, path.memory = 20 * MiB, 0
    assert not offer(budget, MiB, Trace())


def test_what_is_used_soon_stays():
    path, trace = SlowPath(write=100 * MiB, read=100 * MiB), Trace()
    budget = AutomaticBudget(path, GiB)
    budget.learn(step(GiB, GiB))
    assert not offer(budget, 10 * MiB, trace, idle=0.1)  # out and back take 0.2 s
    assert offer(budget, 10 * MiB, trace, idle=0.3)
    assert offer(budget, 10 * MiB, trace, idle=None)
    path.write = path.read = 1.0  # a path that was slow once is tried again
    assert offer(budget, 10 * MiB, Trace(), idle=1.5)


@pytest.mark.parametrize(
    ("read", "passes"),
    [
        # 1.1 s of 10 s: one second too many, in which the path reads 100 MiB; then more again.
        (100, [(1000, 1.1, 90), (900, 0, 92), (900, 0, 96), (900, 0, 100), (900, 0, 100)]),
        # Two seconds, in which the path could have read all of it: one late pass may be chance (it
        # paused), two are not (it is too slow). Then the limit begins to grow anew.
        (1000, [(1000, 2, 80), (800, 2, 0), (0, 0, 2), (20, 2, 1), (10, 0, 3)]),
    ],
)
def test_less_leaves_after_a_backward_that_waited_and_more_again_later(read, passes):
    """Each pass: MiB that left, seconds that it waited, and items that may leave next time."""
    budget = AutomaticBudget(SlowPath(read=float(read * MiB)), GiB)
    for left, waited, expected in passes:
        budget.learn(step(1000 * MiB, left * MiB, waited=waited))
        trace = Trace()
        assert sum(offer(budget, 10 * MiB, trace) for _ in range(100)) == expected


def test_what_is_kept_leaves_a_part_of_the_most_that_was_free(monkeypatch):
    monkeypatch.setattr(budgets, "_UNMEASURED_BYTES", 30)
    free = {torch.device("cpu"): 200, torch.device("meta"): 10_000}
    memory = FreeMemory(free.__getitem__)

    def one_pass(kind="cpu"):
        memory.begin_pass()
        return "".join("-+"[memory.takes(30, torch.device(kind))] for _ in range(6))

    assert one_pass() == "+++++-"  # 30 bytes unseen, then 140 of 200
    free[torch.device("cpu")] = 100  # as other passes have what they kept
    assert one_pass() == "++----"  # 59 must stay free
    assert one_pass("meta") == "++++++"
    free[torch.device("cpu")] = 400
    assert one_pass() == "++++++"


def test_many_small_passes_before_one_backward_are_seen_as_well(monkeypatch):
    monkeypatch.setattr(budgets, "_UNMEASURED_BYTES", 100)
    memory, kept = FreeMemory(lambda _: 0), 0
    for _ in range(100):
        memory.begin_pass()
        kept += memory.takes(30, torch.device("cpu"))
    assert kept <= 75  # and not all of them: there is nothing free at any look


@pytest.mark.parametrize("free", [0, GiB])
def test_what_cannot_be_hidden_leaves_if_there_is_no_memory_for_it(disk, free, monkeypatch):
    monkeypatch.setattr(budgets, "_UNMEASURED_BYTES", 0)
    monkeypatch.setattr(MemoryLimit, "free_bytes", lambda *_: free)
    monkeypatch.setattr(AutomaticBudget, "admits", lambda *_: False)
    sections = {"activations": {"budget": "auto"}, "optimizer": {"enabled": False}}

    def run(engine):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(16) for _ in range(2)))
        if engine is not None:
            engine.attach(model)
        return backward_history(
            model,
            lambda step: model(noise(8, 16, 16, seed=step)).square().mean(),
            between=lambda: None if engine is None else on_disk(engine),
        )

    figures = same_with_and_without(run, settings(disk, **sections))
    saved, left = (figures[f"offload/activations/step_{kind}_bytes"] for kind in ("saved", "left"))
    assert (left, saved > 0) == (0 if free else saved, True)


class Link(SlowPath):
    """Copies of a device to host memory, in order, on the device's clock.

    As in the copy engine, computation waits for the oldest copies while more than a window of bytes
    is referenced, each until all of it is copied.
    """

    def __init__(self, rate, window):
        super().__init__(memory=1 << 50)
        self.bandwidth, self.window, self.known = rate, window, False
        self.ends, self.nbytes = [], 0

    def copy_rate(self):
        return self.bandwidth if self.known else None

    def copy_window(self):
        return self.window

    def copies(self, nbytes, now):
        """Return when the computation may go on."""
        begin = max(now, self.ends[-1][0] if self.ends else 0.0)
        self.ends.append((begin + nbytes / self.bandwidth, nbytes))
        self.nbytes += nbytes
        while self.nbytes > self.window:
            end, done = self.ends.pop(0)
            self.nbytes -= done
            now = max(now, end)
        return now


def device_pass(budget, link, history, items):
    """One pass; return the bytes that left, and seconds: of waits for copies, and of all of it."""
    trace, now, held, waiting = Trace(on_device=True, started_at=0.0), 0.0, 0.0, None
    for nbytes, seconds in items:
        now += seconds
        if waiting is not None:  # the operation that saved it is over
            after = link.copies(waiting, now)
            held, now, waiting = held + after - now, after, None
        trace.prefixes.append(hash((trace.signature, nbytes)))
        trace.sizes.append(nbytes)
        trace.saved_at.append(now)
        trace.held_at.append(held)
        idle, leaves_after = history.times(trace.signature)
        trace.saved_bytes += nbytes
        if budget.admits(nbytes, trace, idle, leaves_after):
            trace.left_bytes += nbytes
            waiting = nbytes
    forward = now
    for index, (_, seconds) in reversed(list(enumerate(items))):
        trace.uses.append((index, now, 0.0))
        now += 2 * seconds
    trace.waited = 1.0 if trace.is_trial else 0.0  # with everything away, backward waits for it
    trace.held, trace.on_device = held, False
    history.learn(trace)
    budget.learn(trace)
    link.known, link.ends, link.nbytes = True, [], 0
    return trace.left_bytes, held, forward


@pytest.mark.parametrize("layers", [4, 16])
@pytest.mark.parametrize("rate", [10, 30, 55, 200])
def test_a_device_computes_while_as_much_leaves_as_its_link_takes(rate, layers):
    """A GPT 8192 wide: MiB that each layer saves, and milliseconds of computation before."""
    layer = [(256, 1), (768, 9), (256, 4), (256, 4), (256, 1), (1024, 12), (1024, 1), (4, 12)]
    items = [(nbytes * MiB, ms / 1000) for nbytes, ms in layer * layers]
    link, history = Link(rate * GiB, 2 * GiB), UseOrderHistory()
    budget = AutomaticBudget(link, GiB)
    saved = sum(nbytes for nbytes, _ in items)
    assert device_pass(budget, link, history, items)[0] == saved
    for _ in range(3):
        left, held, forward = device_pass(budget, link, history, items)
        assert held <= 0.01 * forward
        # But for what backward uses soon, and gaps in which the last operation is not over.
        at_most = min(saved, rate * GiB * forward)
        assert 0.7 * at_most <= left <= at_most + link.window


def test_the_amount_is_told_once_when_it_has_settled(caplog):
    budget = AutomaticBudget(SlowPath(), GiB)
    with caplog.at_level(logging.INFO, logger="offload_strategy"):
        for _ in range(10):
            budget.learn(step(1000 * MiB, 300 * MiB))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "300 MiB of 1000 MiB" in told


# ---------------------------------------------------------------------- prefetching
def test_how_long_an_item_lies_unused_is_known_from_what_came_before_it():
    book, trace, again = UseOrderHistory(), Trace(), Trace()
    for made in (trace, again):
        made.saved(made.prefix_with(torch.empty(2)), 4)
    trace.saved(trace.prefix_with(torch.empty(3)), 4)
    trace.saved_at[:] = [1.0, 2.0]
    trace.uses += [(1, 5.0, 0.0), (0, 9.0, 0.5)]
    book.learn(trace)
    assert book.times(Trace().prefix_with(torch.empty(2)))[0] == 7.5
    assert book.times(again.prefix_with(torch.empty(3)))[0] == 3.0
    assert book.times(again.prefix_with(torch.empty(3, 3))) == (None, None)


class Crossed(nn.Module):
    """Backward does not go through the branches in the reverse order of forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        made = [torch.tanh(branch(x + number)) for number, branch in enumerate(self.branches)]
        return (made[2] * made[0]).sum() + (made[1] * made[3]).exp().mean()


BATCH = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def figure(engine, name):
    return engine.metrics()[f"offload/activations/{name}"]


def test_a_learned_order_has_no_misses(engine):
    misses = []

    def train(model, **options):
        return backward_history(model, lambda step: model(BATCH), steps=6, **options)

    def note():
        misses.append(figure(engine, "missed_loads") - sum(misses))

    expected, model = train(Crossed()), Crossed()
    engine.attach(model)
    assert_same_history(train(model, between=lambda: on_disk(engine), after=note), expected)
    # What is asked for first cannot have been fetched ahead of anything.
    assert misses[0] >= 1
    assert misses[-3:] == [1, 1, 1]


def test_a_distance_in_bytes_is_kept_to(disk):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    lent = []
    with activations_only(disk, prefetch=64 * 32 * 4) as engine:
        engine.attach(model)
        loss = model(noise(64, 32)).sum()
        on_disk(engine)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: lent.append(engine._resources.pool.usage().lent_bytes)
            )
        loss.backward()
    assert 0 < max(lent) <= 3 * 64 * 32 * 4


def test_forward_passes_under_one_hint_are_one_record(engine):
    model = Crossed()
    engine.attach(model)
    sizes = []
    for hinted in (False, True):
        if hinted:
            engine.microbatch(0, last=True)
        (model(BATCH) + model(2 * BATCH)).backward()
        sizes.append(figure(engine, "step_saved_bytes"))
    assert sizes[1] == 2 * sizes[0]


def test_a_step_without_all_of_its_backward_is_learned_from_as_well(engine):
    model = Crossed()
    engine.attach(model)
    misses = []
    for _ in range(4):
        out = model(BATCH)
        on_disk(engine)
        before = figure(engine, "missed_loads")
        torch.autograd.grad(out, list(model.branches[0].parameters()))
        misses.append(figure(engine, "missed_loads") - before)
        del out
    assert misses[0] > misses[-1] == 1


# ---------------------------------------------------------------------- writes per day
STEP_SECONDS = 60.0


class Training:
    """Steps of a minute each, and what activations and states have written by the end of each."""

    def __init__(self, disk, monkeypatch):
        self.disk, self.now, self.written = disk, 1000.0, []
        for module in (budgets, engine_metrics):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def config(self, per_step, host=None):
        made = settings(self.disk, host, optimizer={"overlap": "off"})
        if per_step is not None:
            made["tiers"][-1]["writes_per_day"] = int(per_step * 86400 / STEP_SECONDS)
        return made

    def run(self, config, steps=3):
        """Train with and without an engine; returns its metrics."""
        self.written.clear()
        return same_with_and_without(lambda engine: self._losses(engine, steps), config)

    def _losses(self, engine, steps):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(16) for _ in range(4)))
        optimizer = attached(engine, model, AdamW(model.parameters(), lr=1e-3))
        found = []
        for _ in range(steps):
            loss = model(torch.randn(8, 16, 16)).square().mean()
            if engine is not None:
                on_disk(engine)  # a write that backward comes before is cancelled
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append({"loss": loss.detach()})
            if engine is not None:
                on_disk(engine)
                done = engine._recorder.client_bytes
                self.written.append((done["activations", "written"], done["optimizer", "written"]))
            self.now += STEP_SECONDS
        return found

    def without_budget(self):
        """What a step writes without a budget, of activations and of states."""
        self.run(self.config(None))
        activations, states = (b - a for a, b in zip(*self.written[-2:], strict=True))
        assert activations > states > 0, "what is measured below shows"
        return activations, states


@pytest.fixture
def training(disk, monkeypatch):
    return Training(disk, monkeypatch)


def test_a_budget_for_half_of_the_activations_is_kept_from_the_first_steps_on(training, caplog):
    activations, states = training.without_budget()
    per_step = states + activations / 2
    metrics = training.run(training.config(per_step), steps=40)
    for count, written in enumerate(training.written[9:], start=10):
        assert 0.95 <= sum(written) / (count * per_step) <= 1.05, count
    per_day = metrics["offload/endurance/written_bytes_per_day"]
    assert per_day == pytest.approx(per_step * 86400 / STEP_SECONDS, rel=0.05)
    assert "writes_per_day" not in caplog.text


@pytest.mark.parametrize("missing", ["nothing", "room within the limit", "free memory"])
def test_what_must_move_goes_on_and_is_told_once(training, missing, caplog, monkeypatch):
    activations, states = training.without_budget()
    if missing == "room within the limit":
        monkeypatch.setattr(Budget, "may_stay", lambda *_: False)
    elif missing == "free memory":
        monkeypatch.setattr(budgets, "_UNMEASURED_BYTES", 0)
        monkeypatch.setattr(MemoryLimit, "free_bytes", lambda *_: 0)
    training.run(training.config(states / 4), steps=20)
    (told,) = [one.message for one in caplog.records if "writes_per_day" in one.message]
    assert told.startswith("tier nvme: this process has written")
    assert "cannot be kept" in told
    assert training.written[-1] == (activations * (1 if missing == "nothing" else 20), 20 * states)


def test_a_dram_tier_needs_no_budget_and_processes_share_it(training):
    limited = OffloadConfig.load(training.config(1000, host="1MiB"))
    assert training.run(limited)["offload/activations/step_left_bytes"] > 0
    assert training.written[-1] == (0, 0)
    shared, whole = limited.divided(4).tiers[-1].writes_per_day, limited.tiers[-1].writes_per_day
    assert shared == (whole or 0) // 4
