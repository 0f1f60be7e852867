"""Streamed weights from attach to close: when they move, what looks at them, and failing disks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine, StorageError
from offload_strategy.weights.guarded_parameter import GuardedParameter
from tests.activations.zoo import build
from tests.training import (
    Numbers,
    assert_same_bits,
    assert_same_history,
    bits,
    gradients,
    moved,
    on_disk,
    weights,
)
from tests.weights.support import (
    adamw,
    all_plain,
    away,
    compared,
    loss,
    net,
    step,
    streaming,
    train,
    zoo_loss,
)


def gradients_of(model: Any) -> Numbers:
    return step(model, None, look=gradients)


def test_a_model_that_is_freed_gives_everything_back(engine: OffloadEngine) -> None:
    model = net()
    engine.attach(model)
    gradients_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    on_disk(engine)
    assert engine._resources.store.live_tickets == 0


def test_detaching_brings_the_weights_back(engine: OffloadEngine) -> None:
    model = net()
    engine.attach(model)
    gradients_of(model)
    engine.detach_model(model)
    assert all_plain(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))
    assert engine._resources.store.live_tickets == 0


@pytest.mark.parametrize("overlap", ["in memory"])
def test_two_engines_in_turn_leave_plain_parameters(disk, sections):
    plain, model = net(), net()
    expected = train(plain, adamw(plain), 4)
    history, own = [], adamw(model)
    for number in range(2):
        with streaming(disk, **sections) as engine:
            optimizer = engine.attach(model, own)
            assert any(type(p) is GuardedParameter for p in model.parameters())
            history += train(model, optimizer, 2, first=2 * number)
        assert all_plain(model)
    assert_same_history([*history, weights(model)], [*expected, weights(plain)])


def test_weights_that_do_not_change_are_not_written_again(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    written = []
    for number in range(4):
        step(model, None, number, loss_of=zoo_loss("Llama"))
        on_disk(engine)
        written.append(moved(engine, "parameters"))
    assert written == written[:1] * 4


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


@compared(optimizer_of=None)
def test_a_graph_may_be_used_twice(model, optimizer):
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return [gradients(model)]


def test_a_change_between_forward_and_backward_is_an_error(engine: OffloadEngine) -> None:
    model = net()
    engine.attach(model)
    value = loss(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# ---------------------------------------------------------------------- failing disks
def test_a_disk_that_fails_at_attach_leaves_the_model_as_it_was(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
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
    assert all_plain(model)
    assert store.live_tickets == 0
    engine.attach(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))


def test_a_block_that_cannot_be_read_says_so_and_nothing_is_wrong(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    engine.attach(model)
    on_disk(engine)

    def fail(ticket: Any) -> Any:
        raise StorageError("the disk fails")

    with monkeypatch.context() as broken:
        broken.setattr(engine._resources.store, "private", fail)
        with pytest.raises(StorageError, match="the disk fails"):
            loss(model)
    assert_same_bits(gradients_of(model), gradients_of(net()))


# ---------------------------------------------------------------------- looks
class Subclass(torch.Tensor):
    """Of a user."""


LOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "without bytes": lambda p: (
        (isinstance(p, nn.Parameter), p.shape, p.stride(), p.dtype, p.numel()),
        (p.is_contiguous(), len(p), p.requires_grad, p.grad),
    ),
    "repr": repr,
    "format": lambda p: f"{p} {p.sum():.3f} {p.shape}",
    "array": lambda p: p.detach().numpy().tobytes(),
    "sum": lambda p: float(p.sum()),
    "item": lambda p: p.reshape(-1)[0].item(),
    "finite": lambda p: bool(torch.isfinite(p).all()),
    "rows": lambda p: [bits(row) for row in p],
    "stacked": lambda p: bits(torch.stack([p, p * 2])),
    "type": lambda p: (p.type(), p.is_leaf, p.is_cpu, p.device, p.layout, p.nbytes, p.data.shape),
    "form": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset(), p.dim_order()),
    "storage": lambda p: p.untyped_storage().nbytes(),
    "class": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), bool(p.grad)),
    "new": lambda p: (p.new_zeros(2).dtype, torch.empty_like(p).shape, type(torch.zeros_like(p))),
    "to": lambda p: (type(p.to(torch.float64)), bits(p.double()), bits(p.cpu()), p.cpu() is p),
    "clone": lambda p: (type(p.clone()), bits(p.clone()), type(p.detach()), type(p.data)),
    "hash": lambda p: (p in {p: 1}, {p: 1}[p], any(p is q for q in [p])),
    "as another class": lambda p: bits(p.as_subclass(Subclass).as_subclass(torch.Tensor)),
    "wrapped again": lambda p: (type(nn.Parameter(p)), bits(nn.Parameter(p, False))),
    "detached in place": lambda p: bits(p.detach().detach_()),
}  # fmt: skip


@pytest.mark.usefixtures("no_room")  # each look brings each weight
def test_looking_at_a_weight(engine: OffloadEngine) -> None:
    plain, model = net(), net()
    train(plain, adamw(plain))
    optimizer = engine.attach(model, adamw(model))
    train(model, optimizer)
    for name, look in LOOKS.items():
        before = away(model)
        assert before
        for (of, streamed), expected in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert look(streamed) == look(expected), f"{name} of {of}"
        assert name != "without bytes" or away(model) == before
    assert repr(model) == repr(plain)
