"""One storage is written once, what is only a weight stays, and changes in place are noticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_strategy import OffloadEngine
from tests.activations.support import Calls, X, compare, noise, with_gradients, written
from tests.training import activations_only, assert_same_bits, gradients, moved, on_disk


def test_one_storage_is_written_once_however_many_views_are_saved(engine: OffloadEngine) -> None:
    def attention(w: torch.Tensor) -> torch.Tensor:
        whole = X @ w  # 256 bytes
        q, k, v = whole[:, :3], whole[:, 2:6], whole[:, 4:]
        return (q * q).sum() + (k * k).exp().sum() + (v * whole[:, :4]).sum() + (whole**2).sum()

    model = Calls(attention)
    engine.attach(model)
    loss = model()
    on_disk(engine)
    # x, the product, and what exp saved of itself; the weight stays.
    assert written(engine) == [128, 256, 256]
    loss.backward()
    assert sorted(r.nbytes for r in engine._recorder.moves if r.direction == "read") == [
        128, 256, 256
    ]  # fmt: skip


class _SaveAll(torch.autograd.Function):
    """Saves tensors as they are; its gradient depends on each of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*others)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        factor = sum((index + 1) * t.sum() for index, t in enumerate(ctx.saved_tensors))
        return grad * factor, *([None] * len(ctx.saved_tensors))


def test_views_without_a_base_are_written_once_as_well(engine: OffloadEngine) -> None:
    """As a compiled region saves query, key and value of one product."""

    def function(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            whole = w @ X
        parts = [whole[:, :3].data, whole[:, 3:5].data, whole[:, 5:].data]
        assert all(part._base is None for part in parts)
        return _SaveAll.apply(w * 1, *parts).sum()

    model = Calls(function)
    compare(engine, model, lambda: model())
    before = moved(engine)
    engine.attach(model)
    loss = model()
    on_disk(engine)
    assert moved(engine) - before == 256
    loss.backward()


def test_a_storage_that_was_changed_in_between_is_written_again(engine: OffloadEngine) -> None:
    def function(w: torch.Tensor) -> torch.Tensor:
        y = w * 2
        with torch.no_grad():
            first = (y.detach().clone().requires_grad_() * y).sum()
            y += 1
        return (y * y).sum() + first

    model = Calls(function)
    compare(engine, model, lambda: model())


def test_a_small_view_does_not_drag_its_large_storage_along(engine: OffloadEngine) -> None:
    data = noise(1000, 8)
    model = Calls(lambda w, x: (x @ w).sum())
    engine.attach(model)
    loss = model(data[10:20])
    on_disk(engine)
    assert written(engine) == [10 * 8 * 4]
    loss.backward()


@pytest.mark.parametrize(
    ("options", "leave"),
    [
        ({"min_size": 257}, []),
        ({"min_size": 256}, [256, 256]),
        ({"budget": 300}, [256]),
        ({"budget": "50%"}, [128, 128]),
    ],
)
def test_the_options_say_what_leaves(disk: Path, options: Any, leave: list[int]) -> None:
    def function(w: torch.Tensor) -> torch.Tensor:
        y = torch.exp(w * 1)  # saved: 256 bytes, after w, which stays
        z = torch.exp(y[:4] * 1)  # 128
        u = torch.exp(z * 1)  # 128
        return torch.exp(torch.cat([z, u]) * 1).sum()  # 256

    model, grads = with_gradients(function)
    with activations_only(disk, **options) as engine:
        engine.attach(model)
        loss = model()
        on_disk(engine)
        assert written(engine) == leave
        loss.backward()
        assert_same_bits(gradients(model), grads)


def test_loaded_bytes_go_when_their_last_view_was_used(engine: OffloadEngine) -> None:
    model = Calls(lambda w: [(part.exp() * part).sum() for part in (X @ w * 1.5).chunk(4)])
    engine.attach(model)
    parts = model()
    on_disk(engine)
    for part in parts:
        part.backward(retain_graph=True)
    assert engine.metrics()["offload/memory/pinned_bytes"] > 0
    usage = engine._resources.pool.usage()
    assert usage.lent_bytes == 0, "something is still in memory"


# ---------------------------------------------------------------------- in-place changes
CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "the tensor": lambda t: t["y"].mul_(2),
    "a view of it": lambda t: t["y"][0].zero_(),
    "what it is a view of": lambda t: t["base"].add_(1),
    "the input": lambda t: t["x"].copy_(t["x"] + 1),
    "the weight": lambda t: t["w"].add_(1),
    "a detached alias": lambda t: t["y"].detach().zero_(),
}


@pytest.mark.parametrize("when", ["at once", "when it is on the disk"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("limit", [1, 10_000], ids=["left", "stayed"])
def test_a_change_of_a_saved_tensor_is_an_error_as_without_offload(
    disk: Path, name: str, when: str, limit: int
) -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        base = torch.tanh(torch.tanh(x @ w) @ w)
        y = base[2:]
        return {"loss": (y * y).exp().sum(), "y": y, "base": base, "x": x, "w": w}

    def run(model: nn.Module, between: Callable[[], None]) -> None:
        tensors = model(noise(8, 8))
        between()
        with torch.no_grad():
            CHANGES[name](tensors)
        tensors["loss"].backward()

    plain = "one of the variables needed for gradient computation has been modified by an inplace"
    with pytest.raises(RuntimeError, match=plain) as expected:
        run(Calls(function), lambda: None)
    with activations_only(disk, min_size=limit) as engine:
        model = Calls(function)
        engine.attach(model)
        with pytest.raises(RuntimeError, match=plain) as got:
            run(model, lambda: on_disk(engine) if when != "at once" else None)
    # The same tensor, at the same versions.
    for part in ("is at version", "expected version"):
        assert _number_after(part, str(got.value)) == _number_after(part, str(expected.value))
    assert str(expected.value).split("[")[1].split("]")[0] in str(got.value)
    del expected, got


def _number_after(part: str, text: str) -> str:
    return text.split(part)[1].split()[0].rstrip(";")
