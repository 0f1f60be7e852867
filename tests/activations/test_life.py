"""Whatever becomes of a graph, its tickets go with it."""

import errno
import gc
import itertools
import threading
from contextlib import suppress

import pytest
import torch
from torch import nn

from offload_strategy import OffloadError, StorageError, TierFullError
from offload_strategy.activations.tier_writes import TierWrites
from tests.activations.support import Calls, X, network, noise, with_gradients
from tests.training import (
    activations_only,
    assert_same_bits,
    break_disk,
    gradients,
    left_bytes,
    on_disk,
)


def tickets(engine):
    return engine._resources.store.registry.live


# ---------------------------------------------------------------------- ends of a graph
def _sines(w):
    return (X @ w).exp().sin().cos().sum()


def _two_backwards(model):
    loss = model()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def _double_backward(model):
    (slope,) = torch.autograd.grad(model(), model.weight, create_graph=True)
    slope.pow(2).sum().backward()


def _exception_in_the_middle_of_backward(model):
    loss = model()
    handle = model.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()


def _looked_at_by_hand(model):
    loss = model()
    seen = loss.grad_fn.next_functions[0][0]._saved_self  # what cos was taken of
    assert torch.equal(seen, (X @ model.weight).exp().sin())
    loss.backward()


def _in_another_thread(model):
    losses = [model()]
    thread = threading.Thread(target=lambda: losses.pop().backward())
    thread.start()
    thread.join(30)
    assert not losses


ENDS = {
    "backward": lambda m: m().backward(),
    "no backward": lambda m: m(),
    "two backwards": _two_backwards,
    "double backward": _double_backward,
    "autograd.grad, kept": lambda m: torch.autograd.grad(m(), m.weight, retain_graph=True),
    "exception in the middle of backward": _exception_in_the_middle_of_backward,
    "looked at by hand": _looked_at_by_hand,
    "backward in another thread": _in_another_thread,
}


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "under way"])
@pytest.mark.parametrize("end", ENDS)
def test_no_ticket_outlives(end, stored, engine):
    """At once: without waiting for the collector of reference cycles. Gradients are the same."""
    model = Calls(_sines)
    ENDS[end](model)
    expected = gradients(model)
    model.zero_grad()
    engine.attach(model)
    made = []
    model.register_forward_hook(lambda *_: made.append(tickets(engine)))
    if stored:
        model.register_forward_hook(lambda *_: on_disk(engine))
    gc.disable()
    try:
        ENDS[end](model)
        assert tickets(engine) == 0
    finally:
        gc.enable()
    assert_same_bits(gradients(model), expected)
    assert made[0] > 0
    # A ticket that dies while it is under way may never be written.
    assert not stored or left_bytes(engine.metrics()) > 0


def test_graphs_that_are_kept_for_many_steps_are_still_right(engine):
    """As a replay of old losses: steps go on around them."""
    model = network()

    def loss_of(step):
        return model(noise(4, 8, seed=step)).pow(2).sum()

    def backward(loss):
        model.zero_grad()
        loss.backward()
        return gradients(model)

    expected = [backward(loss_of(step)) for step in range(12)]
    engine.attach(model)
    kept, counts = [], []
    for step in range(12):
        loss = loss_of(step)
        if step % 3 == 0:
            kept.append(loss)
        else:
            assert_same_bits(backward(loss), expected[step])
        del loss
        counts.append(tickets(engine))
    assert counts == [counts[0] * (step // 3 + 1) for step in range(12)]
    for place in (1, 2, 3, 0):
        assert_same_bits(backward(kept[place]), expected[3 * place])
    kept.clear()
    assert tickets(engine) == 0


# ---------------------------------------------------------------------- when things end early
def test_a_backward_after_closing_is_right_or_says_what_is_gone(engine):
    model, expected = with_gradients(_sines, engine)
    stored = model()
    on_disk(engine)
    with engine.forward():
        waiting = (model.weight * 2).sin().sum()
        engine.close()
    with pytest.raises(OffloadError, match=r"closed\. Close it after the last backward"):
        stored.backward()
    del stored
    model.zero_grad()
    waiting.backward()  # it has not left
    assert torch.equal(model.weight.grad, (model.weight * 2).cos() * 2)
    model.zero_grad()
    model().backward()
    assert_same_bits(gradients(model), expected)


def test_what_left_comes_back_after_the_model_was_detached(engine):
    model, expected = with_gradients(_sines, engine)
    loss = model()
    engine.detach_model(model)
    on_disk(engine)
    loss.backward()
    assert_same_bits(gradients(model), expected)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
        assert not getattr(model, hooks)


def test_a_read_that_fails_is_told_in_backward(engine, monkeypatch):
    model, expected = with_gradients(_sines, engine)
    loss = model()
    on_disk(engine)
    with monkeypatch.context() as patch:
        break_disk(patch, "preadv", errno.EIO)
        with pytest.raises(StorageError, match=r"could not read .* of activations"):
            loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()  # the disk is back, and nothing was lost
    assert_same_bits(gradients(model), expected)


@pytest.mark.parametrize(
    ("number", "error_class"), [(errno.EIO, StorageError), (errno.ENOSPC, TierFullError)]
)
def test_a_write_that_fails_is_told_at_the_next_forward(engine, monkeypatch, number, error_class):
    model, expected = with_gradients(_sines, engine)
    with monkeypatch.context() as patch:
        break_disk(patch, "pwritev", number)
        loss = None
        # Unless the first of several saved tensors has failed before the last was put.
        with suppress(error_class):
            loss = model()
            with pytest.raises(error_class):
                on_disk(engine)
    if loss is not None:
        loss.backward()
        assert_same_bits(gradients(model), expected)
    with pytest.raises(error_class, match=r"could not write .* of activations"):
        model()


def test_what_was_saved_last_stays_where_host_memory_is_short(disk):
    with activations_only(disk, host="96KiB") as engine:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        engine.attach(model)
        loss = model(torch.randn(128, 64, requires_grad=True)).sum()  # 32 KiB a saved tensor
        host = engine._resources.memory_tiers["host"]
        found = engine._resources.store.registry._tickets.values()
        next_uses = {entry.next_use: entry.tier is host for entry in found if entry.nbytes == 32768}
        in_memory = [next_uses[next_use] for next_use in sorted(next_uses)]
        assert in_memory == [True] * 3 + [False] * (len(in_memory) - 3)
        assert len(in_memory) >= 8
        loss.backward()


# ---------------------------------------------------------------------- batches
def test_items_wait_for_each_other_as_long_as_they_are_a_small_share_of_a_pass(engine, monkeypatch):
    # On a busy machine tiny writes are so slow that batches would be smaller.
    monkeypatch.setattr(TierWrites, "rate", lambda *_, **__: None)
    items, together = 200, 15  # so many are saved by a pass, of which 7 % may wait

    def chain(weight):
        value = X @ weight
        for _ in range(items):
            value = value.sin()
            seen[-1].append(tickets(engine))
        return value.sum()

    seen = [[]]
    model, expected = with_gradients(chain, engine)
    for _ in range(2):
        seen.append([])
        model.zero_grad()
        model().backward()
        assert_same_bits(gradients(model), expected)
    _, first, second = seen
    # Nothing is known of the first pass, so every item leaves when the next operation saves one.
    assert first == list(range(1, items + 1))  # X is the first
    assert second[-1] >= items - together
    assert {after - before for before, after in itertools.pairwise(second)} == {0, together}
    with engine.forward():
        dead = (X.clone().requires_grad_() * 2).sin()
        del dead  # while it waits
    assert tickets(engine) == 0
