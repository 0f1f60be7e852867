"""Streamed weights through everything that may happen to a model."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine, StorageError
from tests.activations.zoo import batch, build, loss_of
from tests.training import Numbers, assert_same_bits, gradients, moved, on_disk
from tests.weights.support import away, compared, loss, net, step, streaming, zoo_loss


def gradients_of(model: Any) -> Numbers:
    return step(model, None, loss_of=zoo_loss("Llama"), look=gradients)


@pytest.fixture
def engine(disk: Path) -> Any:
    with streaming(disk) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return gradients_of(build("Llama"))


def test_a_model_that_is_freed_gives_everything_back(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    gradients_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    on_disk(engine)
    assert engine._resources.store.live_tickets == 0


def test_detaching_brings_the_weights_back(
    engine: OffloadEngine, expected: dict[str, torch.Tensor]
) -> None:
    model = build("Llama")
    engine.attach(model)
    gradients_of(model)
    engine.detach_model(model)
    assert away(model) == []
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_same_bits(gradients_of(model), expected)
    assert engine._resources.store.live_tickets == 0


def test_weights_that_do_not_change_are_not_written_again(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    gradients_of(model)
    on_disk(engine)
    before = moved(engine, "parameters")
    for _ in range(3):
        gradients_of(model)
    with torch.no_grad():
        loss_of(model, batch("Llama", 1))
    on_disk(engine)
    assert moved(engine, "parameters") == before


def test_a_whole_pass_reads_each_weight_once(engine: OffloadEngine) -> None:
    model = net()
    engine.attach(model)
    with torch.no_grad():
        loss(model)
        on_disk(engine)
        before = moved(engine, "parameters", "read")
        loss(model)
    total = sum(p.nbytes for p in model.parameters())
    assert 0 < moved(engine, "parameters", "read") - before <= total


@compared(lambda: build("Llama"), optimizer_of=None)
def test_a_graph_may_be_used_twice(model, optimizer):
    value = zoo_loss("Llama")(model, 0)
    value.backward(retain_graph=True)
    value.backward()
    return [gradients(model)]


def test_a_change_between_forward_and_backward_is_an_error(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    value = loss_of(model, batch("Llama", 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_disk_that_fails_at_attach_leaves_the_model_as_it_was(
    engine: OffloadEngine,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, torch.Tensor],
) -> None:
    model = build("Llama")
    store = engine._resources.store
    real, calls = store.put, []

    def put(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise StorageError("the disk fails")
        return real(*args, **options)

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(StorageError, match="the disk fails"):
        engine.attach(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert away(model) == []
    assert store.live_tickets == 0
    engine.attach(model)
    assert_same_bits(gradients_of(model), expected)


def test_a_block_that_cannot_be_read_says_so_and_nothing_is_wrong(
    engine: OffloadEngine,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, torch.Tensor],
) -> None:
    model = build("Llama")
    engine.attach(model)
    on_disk(engine)

    def fail(ticket: Any) -> Any:
        raise StorageError("the disk fails")

    with monkeypatch.context() as broken:
        broken.setattr(engine._resources.store, "private", fail)
        with pytest.raises(StorageError, match="the disk fails"):
            loss_of(model, batch("Llama", 0))
    assert_same_bits(gradients_of(model), expected)
