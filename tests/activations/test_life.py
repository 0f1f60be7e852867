"""Whatever becomes of a graph, its tickets go with it."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine, OffloadError, StorageError, TierFullError
from tests.activations.support import Calls, X, noise, with_gradients
from tests.training import activations_only, assert_same_bits, gradients, moved, on_disk


# ---------------------------------------------------------------------- ends of a graph
def _sines(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).exp().sin().sum()


def _chained(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).exp().sin().cos().sum()


def _two_backwards(model: nn.Module) -> None:
    loss = model()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def _double_backward(model: nn.Module) -> None:
    (slope,) = torch.autograd.grad(model(), model.weight, create_graph=True)
    slope.pow(2).sum().backward()


def _exception_in_the_middle_of_backward(model: nn.Module) -> None:
    loss = model()
    handle = model.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()


def _looked_at_by_hand(model: nn.Module) -> None:
    loss = model()
    seen = loss.grad_fn.next_functions[0][0]._saved_self  # what cos was taken of
    assert torch.equal(seen, (X @ model.weight).exp().sin())
    loss.backward()


def _in_another_thread(model: nn.Module) -> None:
    losses = [model()]
    thread = threading.Thread(target=lambda: losses.pop().backward())
    thread.start()
    thread.join(30)
    assert not losses


ENDS: dict[str, Callable[[nn.Module], None]] = {
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
def test_no_ticket_outlives(
    end: str, stored: bool, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: without waiting for the collector of reference cycles. Gradients are the same."""
    model = Calls(_chained)
    ENDS[end](model)
    expected = gradients(model)
    model.zero_grad()
    engine.attach(model)
    if stored:
        model.register_forward_hook(lambda *_: on_disk(engine))
    store, made = engine._resources.store, []
    put_all = store.put_all

    def counted(*args: Any, **options: Any) -> Any:
        made.append(len(made))
        return put_all(*args, **options)

    monkeypatch.setattr(store, "put_all", counted)
    gc.disable()
    try:
        ENDS[end](model)
        assert store.live_tickets == 0
    finally:
        gc.enable()
    assert_same_bits(gradients(model), expected)
    assert made
    # A ticket that dies while it is under way may never be written.
    assert not stored or moved(engine) + moved(engine, verb="forwarded") > 0


def test_graphs_that_are_kept_for_many_steps_are_still_right(engine: OffloadEngine) -> None:
    """As a replay of old losses: steps go on around them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    batches = [noise(4, 8, seed=seed) for seed in range(12)]
    expected = []
    for batch in batches:
        model.zero_grad()
        model(batch).pow(2).sum().backward()
        expected.append(gradients(model))
    engine.attach(model)
    store, kept = engine._resources.store, []
    counts = []
    for step, batch in enumerate(batches):
        loss = model(batch).pow(2).sum()
        if step % 3 == 0:
            kept.append((step, loss))
        else:
            model.zero_grad()
            loss.backward()
            assert_same_bits(gradients(model), expected[step])
        del loss
        counts.append(store.live_tickets)
    assert counts == [counts[0] * (step // 3 + 1) for step in range(12)]
    while kept:
        step, loss = kept.pop(1 if len(kept) > 1 else 0)
        model.zero_grad()
        loss.backward()
        assert_same_bits(gradients(model), expected[step])
    del loss
    assert store.live_tickets == 0


# ---------------------------------------------------------------------- when things end early


def test_a_backward_after_closing_is_right_or_says_what_is_gone(disk: Path) -> None:
    model, expected = with_gradients(_sines)
    engine = activations_only(disk)
    engine.attach(model)
    stored = model()
    on_disk(engine)
    engine.close()
    with pytest.raises(OffloadError, match=r"closed\. Close it after the last backward"):
        stored.backward()
    del stored
    model.zero_grad()
    model().backward()
    assert_same_bits(gradients(model), expected)


def test_what_left_comes_back_after_the_model_was_detached(engine: OffloadEngine) -> None:
    model, expected = with_gradients(_sines)
    engine.attach(model)
    loss = model()
    engine.detach_model(model)
    on_disk(engine)
    loss.backward()
    assert_same_bits(gradients(model), expected)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks_always_called


def test_a_read_that_fails_is_told_in_backward(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = with_gradients(_sines)
    engine.attach(model)
    loss = model()
    on_disk(engine)

    def broken(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match=r"could not read .* of activations"):
            loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()  # the disk is back, and nothing was lost
    assert_same_bits(gradients(model), expected)


@pytest.mark.parametrize(
    ("number", "error_class"), [(errno.EIO, StorageError), (errno.ENOSPC, TierFullError)]
)
def test_a_write_that_fails_loses_nothing_and_is_told_at_the_next_forward(
    engine: OffloadEngine,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error_class: type[OffloadError],
) -> None:
    model, expected = with_gradients(_sines)
    engine.attach(model)

    def broken(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        told = False
        try:
            loss = model()
            with pytest.raises(error_class):
                on_disk(engine)
        except error_class:
            told = True  # the first of several saved tensors failed before the last was put
    if not told:
        loss.backward()
        assert_same_bits(gradients(model), expected)
    with pytest.raises(error_class, match=r"could not write .* of activations"):
        model()


def test_what_was_saved_last_stays_where_host_memory_is_short(disk: Path) -> None:
    with activations_only(disk, host="96KiB") as engine:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        engine.attach(model)
        loss = model(torch.randn(128, 64, requires_grad=True)).sum()  # 32 KiB a saved tensor
        resources = engine._resources
        host = resources.memory_tiers["host"]
        tickets = {
            id(entry): entry
            for _, entry in resources.store._registry._tickets.values()
            if entry.nbytes == 32 * 1024
        }
        order = sorted(tickets.values(), key=lambda entry: entry.next_use or 0)
        assert len(order) >= 8
        assert [entry.tier is host for entry in order[:3]] == [True] * 3
        assert not any(entry.tier is host for entry in order[3:])
        loss.backward()
