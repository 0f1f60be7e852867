"""Streamed weights through everything that may happen to a model."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine, StorageError
from tests.activations.zoo import batch, build, loss_of
from tests.training import (
    assert_same_bits,
    assert_same_history,
    backward_history,
    gradients,
    moved,
    on_disk,
    weights,
)
from tests.weights.test_streaming import away, streaming


def gradients_of(model: Any, kind: str = "Llama") -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    loss = loss_of(model, batch(kind, 0))
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.fixture
def engine(disk: Path) -> Any:
    with streaming(disk) as made:
        yield made


@pytest.fixture
def expected() -> dict[str, torch.Tensor]:
    return gradients_of(build("Llama"))


def test_a_block_that_raises_leaves_nothing_held(
    engine: OffloadEngine, expected: dict[str, torch.Tensor]
) -> None:
    model = build("Llama")
    engine.attach(model)
    layer = model.model.layers[1].mlp

    def fail(module: nn.Module, args: Any) -> None:
        raise LookupError

    hook = layer.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(LookupError):
            loss_of(model, batch("Llama", 0))
    hook.remove()
    assert_same_bits(gradients_of(model), expected)
    assert_same_bits(gradients_of(model), expected)
    assert len(away(model)) > len(list(model.parameters())) // 2


def test_an_error_in_backward_leaves_nothing_held(
    engine: OffloadEngine, expected: dict[str, torch.Tensor]
) -> None:
    model = build("Llama")
    engine.attach(model)
    first = next(model.parameters())

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        raise LookupError

    hook = first.register_hook(fail)
    with pytest.raises(LookupError):
        gradients_of(model)
    hook.remove()
    assert_same_bits(gradients_of(model), expected)


def test_a_model_that_dies_gives_everything_back(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    gradients_of(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    on_disk(engine)
    assert engine._resources.store.live_tickets == 0


def test_a_copy_is_plain_and_has_the_values(
    engine: OffloadEngine, expected: dict[str, torch.Tensor]
) -> None:
    model = build("Llama")
    engine.attach(model)
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert_same_bits(gradients_of(twin), expected)
    assert_same_bits(gradients_of(model), expected)


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


def test_loaded_values_are_kept(engine: OffloadEngine) -> None:
    model, other = build("Llama"), build("Llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5).add_(0.01)
    engine.attach(model)
    model.load_state_dict(other.state_dict())
    assert_same_bits(gradients_of(model), gradients_of(other))
    assert_same_bits(weights(model), weights(other))


def test_another_precision_is_kept(engine: OffloadEngine) -> None:
    model, other = build("Llama"), build("Llama")
    engine.attach(model)
    for each in (model, other):
        each.double()
    assert_same_bits(gradients_of(model), gradients_of(other))
    assert away(model)


def test_a_tensor_that_shares_memory_sees_updates(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n in away(model))
    alias = parameter.detach()
    gradients_of(model)
    alias.fill_(0.25)
    del alias
    gradients_of(model)
    assert torch.equal(model.get_parameter(name), torch.full_like(parameter, 0.25))


def test_weights_that_do_not_change_are_not_written_again(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    gradients_of(model)
    on_disk(engine)
    before = moved(engine, "parameters", "written")
    for _ in range(3):
        gradients_of(model)
    with torch.no_grad():
        loss_of(model, batch("Llama", 1))
    on_disk(engine)
    assert moved(engine, "parameters", "written") == before
    assert moved(engine, "parameters", "read") > 0


def test_checkpointing_inside_of_blocks(engine: OffloadEngine) -> None:
    for reentrant in (False, True):
        model, plain = build("Llama", reentrant), build("Llama", reentrant)
        engine.attach(model)
        assert_same_bits(gradients_of(model), gradients_of(plain))


def test_plain_gradient_descent(engine: OffloadEngine) -> None:
    model, plain = build("GPT-2"), build("GPT-2")
    engine.attach(model)
    got = backward_history(model, lambda step: loss_of(model, batch("GPT-2", step)))
    assert_same_history(
        got, backward_history(plain, lambda step: loss_of(plain, batch("GPT-2", step)))
    )


def test_a_graph_may_be_used_twice(engine: OffloadEngine) -> None:
    results = []
    for model in (build("Llama"), build("Llama")):
        if not results:
            engine.attach(model)
        torch.manual_seed(5)
        loss = loss_of(model, batch("Llama", 0))
        loss.backward(retain_graph=True)
        loss.backward()
        results.append(gradients(model))
    assert_same_bits(*results)


def test_a_change_between_forward_and_backward_is_an_error(engine: OffloadEngine) -> None:
    model = build("Llama")
    engine.attach(model)
    loss = loss_of(model, batch("Llama", 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_generating(engine: OffloadEngine) -> None:
    model, plain = build("Llama"), build("Llama")
    engine.attach(model)
    prompt = torch.tensor([[1, 2, 3]])
    for each in (model, plain):
        each.eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def test_frozen_weights_and_an_adapter(disk: Path) -> None:
    results = []
    for streamed in (True, False):
        model = build("Llama")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        torch.manual_seed(9)
        for layer in model.model.layers:
            own = layer.mlp.down_proj
            layer.mlp.down_proj = nn.Sequential(own, nn.Linear(own.out_features, own.out_features))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        engine = streaming(disk) if streamed else None
        if engine is not None:
            optimizer = engine.attach(model, optimizer)
        for step in range(3):
            torch.manual_seed(step)
            loss_of(model, batch("Llama", step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            engine.close()
        results.append(weights(model))
    assert_same_bits(*results)


def test_a_disk_that_fails_at_attach_leaves_the_model_as_it_was(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
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
    assert_same_bits(gradients_of(model), expected)
    engine.attach(model)
    assert_same_bits(gradients_of(model), expected)


def test_a_block_that_cannot_be_read_says_so_and_nothing_is_wrong(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, torch.Tensor]
) -> None:
    model = build("Llama")
    engine.attach(model)
    on_disk(engine)
    store = engine._resources.store

    def fail(ticket: Any) -> Any:
        raise StorageError("the disk fails")

    with monkeypatch.context() as broken:
        broken.setattr(store, "private", fail)
        with pytest.raises(StorageError, match="the disk fails"):
            loss_of(model, batch("Llama", 0))
    assert_same_bits(gradients_of(model), expected)
