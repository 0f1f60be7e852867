"""Errors and threads: whatever breaks off, and whoever else looks, no turn stays open."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy.store.ticket import TicketState
from tests.activations.test_recompute import WAYS
from tests.activations.zoo import batch, build
from tests.training import (
    assert_same_bits,
    assert_same_history,
    bits,
    in_turn,
    on_disk,
    weights,
)
from tests.weights.support import (
    THAT_KEEP_GRADIENTS,
    Regions,
    adamw,
    compared,
    loss,
    nearly_all_left,
    net,
    open_turns,
    overlapping,
    seen_accesses,
    step,
    streaming,
    train,
)

# ---------------------------------------------------------------------- errors
Fail = Callable[..., None]

PLACES: dict[str, Callable[[Any, Fail], Any]] = {
    "before a block": lambda m, fail: m.blocks[1].register_forward_pre_hook(fail, prepend=True),
    "in a block": lambda m, fail: m.blocks[1].down.register_forward_pre_hook(fail),
    "at the end of a block": lambda m, f: m.blocks[1].register_forward_hook(f, prepend=True),
    "after the model": lambda m, fail: m.register_forward_hook(fail),
    "after the backward of a layer": lambda m, fail: m.blocks[1].down.register_full_backward_hook(
        fail
    ),
    "at the gradient of a weight": lambda m, fail: m.blocks[1].up.weight.register_hook(fail),
    "when a gradient is complete": lambda m, fail: m.blocks[
        1
    ].up.weight.register_post_accumulate_grad_hook(fail),
}
ERRORS = [LookupError, KeyboardInterrupt]


def failing(error: type[BaseException], when: Callable[[], bool] = lambda: True) -> Fail:
    def fail(*args: Any) -> None:
        if when():
            raise error

    return fail


def recovers(
    disk: Path,
    overlap: str,
    error: type[BaseException],
    make: Callable[[], Any],
    break_: Callable[[Any], Any],
) -> None:
    """After steps that fail, no weight stays in use, and training has the plain numbers.

    `break_` makes steps fail, and returns the handle of its hook.
    """
    plain = make()
    expected = [*train(plain, adamw(plain)), weights(plain)]
    with streaming(disk, **overlapping(overlap)) as engine:
        model = make()
        optimizer = engine.attach(model, adamw(model))
        handle = break_(model)
        for _ in range(2):
            with pytest.raises(error):
                step(model, optimizer)
            optimizer.zero_grad()
            if error is LookupError:
                assert open_turns(engine) == []
        handle.remove()
        history = train(model, optimizer)
        assert open_turns(engine) == []
        assert nearly_all_left(model)
    assert_same_history([*history, weights(model)], expected)


@pytest.mark.parametrize(
    ("place", "error", "overlap"), in_turn(PLACES, ERRORS, [*THAT_KEEP_GRADIENTS, "commit"])
)
def test_an_error_leaves_no_weight_in_use(
    disk: Path, place: str, error: type[BaseException], overlap: str
) -> None:
    recovers(disk, overlap, error, net, lambda model: PLACES[place](model, failing(error)))


@pytest.mark.parametrize(
    ("way", "error"), in_turn(["reentrant", "non-reentrant", "two reentrant"], ERRORS)
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_an_error_in_recomputation(disk: Path, way: str, error: type[BaseException]) -> None:
    fail = failing(error, lambda: torch._C._current_graph_task_id() != -1)

    def break_(model: Any) -> Any:
        return model.blocks[1].down.register_forward_pre_hook(fail)

    recovers(disk, "off", error, lambda: net(lambda: Regions(WAYS[way])), break_)


@pytest.mark.parametrize("at_once", [True, False], ids=["and then the end", "and passes after it"])
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_and_no_step_after_it(
    disk: Path, error: type[BaseException], at_once: bool
) -> None:
    expected = weights(net())
    with streaming(disk) as engine:
        model = net()
        engine.attach(model)
        handle = model.blocks[1].up.register_forward_pre_hook(failing(error))
        model.eval()
        with torch.set_grad_enabled(at_once), pytest.raises(error):
            loss(model)
        handle.remove()
        assert torch.equal(model.head.weight, expected["head.weight"])
        with torch.no_grad():
            for number in range(0 if at_once else 3):
                loss(model, number)
        if not at_once:
            assert open_turns(engine) == []
            assert nearly_all_left(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same_bits(weights(model), expected)


def test_a_touch_that_fails_leaves_no_turn_open(disk: Path) -> None:
    with streaming(disk) as engine:
        model = net()
        engine.attach(model)
        for parameter in model.parameters():
            with pytest.raises(RuntimeError):
                parameter @ torch.ones(77)
            with pytest.raises((RuntimeError, IndexError)):
                parameter[999]
            with pytest.raises(RuntimeError, match="leaf Variable"):
                parameter.mul_(2)
        assert open_turns(engine) == []
        with torch.no_grad():
            loss(model)
        assert nearly_all_left(model)
    assert_same_bits(weights(model), weights(net()))


# ---------------------------------------------------------------------- threads
@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """So that threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
def test_two_threads_infer_with_one_model(disk: Path) -> None:
    model = build("GPT-2").eval()

    def infer(number: int) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = model(batch("GPT-2", number)["input_ids"]).logits.clone()
            return output

    expected = [infer(number) for number in range(16)]
    with streaming(disk) as engine, ThreadPoolExecutor(2) as pool:
        engine.attach(model)
        got = list(pool.map(infer, range(16)))
        assert open_turns(engine) == []
        infer(0)
        infer(1)
        assert nearly_all_left(model)
    assert [bits(value) for value in got] == [bits(value) for value in expected]


def test_a_touch_is_seen_while_another_thread_touches_the_same_weight(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the weight in memory by itself, whichever is over first."""
    accessed = seen_accesses(monkeypatch)
    model = net()
    expected = float(model.scale.sum())
    with streaming(disk) as engine, ThreadPoolExecutor(1) as pool:
        engine.attach(model)
        assert engine._stream is not None
        weight = engine._stream._weights[model.scale]
        accessed.clear()
        weight.begin_access()  # as this thread does, before a long operation
        assert pool.submit(lambda: float(model.scale.sum())).result() == expected
        assert accessed == [weight, weight]
        weight.begin_access()  # as another does, beside it
        weight.end_access()
        assert weight.is_resident
        assert not weight.can_be_offloaded()
        weight.end_access()
        assert weight.can_be_offloaded()


@pytest.mark.usefixtures("impatient_threads")
def test_a_thread_that_watches_while_another_trains(disk: Path) -> None:
    """As one that logs norms does: what it sees is of one step or another, and never NaN."""
    plain = net()
    expected = [*train(plain, adamw(plain), 6), weights(plain)]
    with streaming(disk) as engine:
        model = net()
        optimizer = engine.attach(model, adamw(model))
        over, seen = threading.Event(), []

        def watch() -> None:
            while not over.is_set():
                for parameter in model.parameters():
                    seen.append(bool(torch.isfinite(parameter.detach().clone()).all()))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            history = train(model, optimizer, 6)
        finally:
            over.set()
            watcher.join()
        assert seen
        assert all(seen)
        assert open_turns(engine) == []
    assert_same_history([*history, weights(model)], expected)


def test_a_prefetch_while_another_thread_offloads_the_weight_anew(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streaming(disk) as engine:
        model = net()
        engine.attach(model)
        on_disk(engine)
        assert engine._stream is not None
        weight, store = engine._stream._weights[model.scale], engine._resources.store
        assert not weight.is_resident
        prefetch = store.prefetch

        def late(ticket: Any) -> bool:
            monkeypatch.undo()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: float(model.scale.sum())).result()
            weight.offload()
            assert ticket.state is TicketState.FREED
            return prefetch(ticket)

        monkeypatch.setattr(store, "prefetch", late)
        assert weight.prefetch()
    assert_same_bits(weights(model), weights(net()))


@compared()
def test_backward_on_another_thread(model, optimizer):
    class ElsewhereBackward:
        """A loss whose backward runs on a thread of its own."""

        def __init__(self, value: torch.Tensor) -> None:
            self.value, self.detach = value, value.detach

        def backward(self) -> None:
            thread = threading.Thread(target=self.value.backward)
            thread.start()
            thread.join()

    return train(model, optimizer, loss_of=lambda m, number: ElsewhereBackward(loss(m, number)))
