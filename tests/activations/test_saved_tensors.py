"""Saved tensors of every kind, used in every way that autograd allows."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from offload_strategy import OffloadEngine, OffloadError, StorageError, TierFullError
from tests.training import (
    activations_only,
    assert_same_bits,
    bits,
    gradients,
    moved,
    on_disk,
    saved_storages,
)


class Calls(nn.Module):
    """A module whose forward is a function of the weight and the input."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(*shape or (8, 8)))
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.weight, *args)


@pytest.fixture
def engine(disk: Path) -> Iterator[OffloadEngine]:
    with activations_only(disk) as made:
        yield made


def noise(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, **options)


def compare(
    engine: OffloadEngine, model: nn.Module, step: Callable[[], Any], leaves: bool = True
) -> None:
    """Run a step without and with offload: the same gradients, and bytes that left."""

    def run(between: Callable[[], None]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        result = step()
        result = result if isinstance(result, tuple) else (result,)
        between()
        loss, *others = result
        loss.backward()
        numbers = {"loss": loss.detach().clone(), **gradients(model)}
        for index, tensor in enumerate(others):
            numbers[f"gradient of input {index}"] = tensor.grad.clone()
            tensor.grad = None
        return numbers

    expected = run(lambda: None)
    engine.attach(model)
    for between in (lambda: None, lambda: on_disk(engine)):
        assert_same_bits(run(between), expected)
    assert (moved(engine) > 0) == leaves
    engine.detach_model(model)


# ---------------------------------------------------------------------- kinds of tensors
X = noise(8, 8, seed=1)

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matrix products": lambda w: (X @ w @ w.T).tanh().sum(),
    "transposed and strided views": lambda w: ((w * 2).t()[::2, 1:].exp() * w[:4, :7]).sum(),
    "views of one buffer": lambda w: torch.stack(
        [(part * part).sin().prod() for part in (w @ X).chunk(4)]
    ).sum(),
    "expanded tensors": lambda w: (w.sum(0).exp().expand(8, 8) * w).prod(1).sum(),
    "a scalar": lambda w: (w.sum().exp() * w).sin().sum(),
    "nothing at all": lambda w: (w[:0].exp().sum() + w.exp()).sum(),
    "half precision": lambda w: (w.half().exp() * w.half()).float().sum(),
    "bfloat16": lambda w: ((w.bfloat16() @ X.bfloat16()).relu() ** 2).float().sum(),
    "double precision": lambda w: (w.double().exp() @ X.double()).sin().sum(),
    "bools": lambda w: torch.where((w * 1) > 0, (w @ X).exp(), w.sin()).sum(),
    "integers": lambda w: (w * 2).exp().gather(1, (X.abs() * 2).long()).prod(1).sum(),
    "small integers": lambda w: F.max_pool2d((w * 2).reshape(1, 1, 8, 8).exp(), 2).pow(2).sum(),
    "complex numbers": lambda w: torch.fft.fft2(w @ X).exp().abs().sum(),
    "complex conjugates": lambda w: (
        (torch.view_as_complex(w.reshape(8, 4, 2) * 1).conj() ** 3).exp().imag.sum()
    ),
    "real parts of slices": lambda w: _parts_of_complex(w).sum(),
    "infinities and NaN": lambda w: (
        (w.detach() > 9e9).float() + (w - w).log() * w.clamp(0.1)
    ).nansum() + (w * float("nan")).exp().sum(),
    "channels last": lambda w: F.conv2d(
        noise(2, 8, 5, 5).contiguous(memory_format=torch.channels_last), w.reshape(8, 8, 1, 1)
    ).exp().sum(),
    "dropout": lambda w: F.dropout(F.dropout(X @ w, 0.3), 0.3).pow(2).sum(),
    "in-place relu": lambda w: F.relu(F.relu(X @ w, inplace=True) @ w, inplace=True).sum(),
    "a change before it is saved": lambda w: (w * 2).mul_(3).exp_().sin().sum(),
    "embedding": lambda w: F.embedding(torch.tensor([1, 5, 1]), w).exp().sum(),
    "norms": lambda w: F.group_norm(F.layer_norm(X @ w, (8,)), 2).exp().sum(),
    "attention": lambda w: F.scaled_dot_product_attention(
        *(X @ w).reshape(8, 2, 4).transpose(0, 1).repeat(3, 1, 1, 1).unbind(0), is_causal=True
    ).exp().sum(),
    "sorting": lambda w: ((w * 2).sort(0).values.cumsum(0).cumprod(1)).sum(),
    "linear algebra": lambda w: torch.linalg.svdvals(w @ X).prod() + torch.linalg.det(w),
    "vmap": lambda w: torch.func.vmap(lambda row: (row.exp() * (w @ row)).sum())(X @ w).sum(),
}  # fmt: skip


def _parts_of_complex(w: torch.Tensor) -> torch.Tensor:
    # The imaginary parts begin four bytes into the numbers: no offset in whole numbers exists
    # for the slice that is saved next.
    storage = torch.view_as_complex(torch.cat([w, w, w, w]).reshape(-1, 2) * 1.5)
    part = storage[5:15]
    return (part.imag.exp() * part.imag).sum() + (part[1:] * part[:-1].abs()).abs()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_the_same_with(name: str, engine: OffloadEngine) -> None:
    model = Calls(lambda w: FUNCTIONS[name](w))
    compare(engine, model, lambda: model())


LAYERS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "convolution and batch norm": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten()
        ),
        noise(2, 3, 8, 8),
    ),
    "LSTM": lambda: (_First(nn.LSTM(6, 5, 2, dropout=0.2, bidirectional=True)), noise(7, 2, 6)),
    "GRU": lambda: (_First(nn.GRU(6, 5)), noise(7, 2, 6)),
    "transformer": lambda: (nn.TransformerEncoderLayer(8, 2, 16), noise(5, 2, 8)),
    "weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), noise(3, 8)
    ),
    "spectral norm": lambda: (
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), noise(3, 8)
    ),
    "tied weights": lambda: (_Tied(), noise(3, 8)),
    "a module that calls itself": lambda: (_Recursive(), noise(3, 8)),
}  # fmt: skip


class _First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).gelu() if hasattr(x, "gelu") else F.gelu(self.one(x)))


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        return x if depth == 0 else self(x, depth - 1) * x


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_the_same_through(name: str, engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model, x = LAYERS[name]()
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    x.requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        for key, value in model.named_buffers():
            value.copy_(buffers[key])
        return model(x).pow(2).sum(), x

    compare(engine, model, step)


class Wrapped(torch.Tensor):
    """A tensor that is more than its storage: it says how often it was computed with."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        unwrap = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        result = function(*unwrap[0], **unwrap[1])
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, result)


def test_tensor_subclasses_and_sparse_tensors_stay_what_they_are(engine: OffloadEngine) -> None:
    seen: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, *others)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, other, sparse = ctx.saved_tensors
            seen.append((type(other), sparse.layout))
            return grad * 2 * x * other.inner, None, None

    sparse, wrapped = torch.eye(8).to_sparse(), Wrapped(noise(8, 8))

    def function(w: torch.Tensor) -> torch.Tensor:
        squared = Square.apply(w * 3, wrapped, sparse)
        return squared.sum() + torch.sparse.mm(sparse, w * 2).exp().sum()

    model = Calls(function)
    compare(engine, model, lambda: model())
    assert seen == [(Wrapped, torch.sparse_coo)] * 3


def test_gradients_of_inputs_and_of_other_leaves_are_the_same(engine: OffloadEngine) -> None:
    x, scale = noise(8, 8, seed=2).requires_grad_(), noise(8).requires_grad_()
    model = Calls(lambda w, x: ((x @ w).exp() * scale).sum())
    compare(engine, model, lambda: (model(x), x, scale))


def test_what_custom_functions_save_comes_back(engine: OffloadEngine) -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            ctx.save_for_backward(x, None, y)
            ctx.note = "kept"
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            x, nothing, y = ctx.saved_tensors
            assert nothing is None
            assert ctx.note == "kept"
            return grad * y + 0 * x

    model = Calls(lambda w: Both.apply(w @ X).sum())
    compare(engine, model, lambda: model())


# ---------------------------------------------------------------------- what is written
def written(engine: OffloadEngine) -> list[int]:
    """Sizes of the writes that are over."""
    return sorted(record.nbytes for record in engine._recorder.moves)


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


def test_weights_buffers_and_their_views_stay(engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    inputs = noise(4, 8)
    engine.attach(model)
    loss = model(inputs).sum()
    on_disk(engine)
    engine.detach_model(model)
    model.zero_grad()
    others = saved_storages(lambda: model(inputs), [*model.parameters(), *model.buffers()])
    assert written(engine) == sorted(storage.nbytes() for storage in others)
    loss.backward()


@pytest.mark.parametrize(
    ("options", "leave"),
    [
        ({"min_size": 257}, []),
        ({"min_size": 256}, [256, 256]),
        ({"budget": 0}, []),
        ({"budget": 300}, [256]),
        ({"budget": 384}, [128, 256]),
        ({"budget": "100%"}, [128, 128, 256, 256]),
        ({"budget": "0%"}, []),
        ({"budget": "50%"}, [128, 128]),
    ],
)
def test_the_options_say_what_leaves(disk: Path, options: Any, leave: list[int]) -> None:
    def function(w: torch.Tensor) -> torch.Tensor:
        y = torch.exp(w * 1)  # saved: 256 bytes, after w, which stays
        z = torch.exp(y[:4] * 1)  # 128
        u = torch.exp(z * 1)  # 128
        return torch.exp(torch.cat([z, u]) * 1).sum()  # 256

    model = Calls(function)
    expected = model()
    expected.backward()
    grads = gradients(model)
    model.zero_grad()
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


# ---------------------------------------------------------------------- ways of going back
def test_a_graph_that_is_kept_may_be_gone_through_again(engine: OffloadEngine) -> None:
    model = Calls(lambda w: ((X @ w).exp() * torch.tanh(X @ w)).sum())

    def run(wait: Callable[[], None]) -> list[tuple[Any, ...]]:
        loss = model()
        results = []
        for keep in (True, True, False):
            wait()
            model.zero_grad()
            loss.backward(retain_graph=keep)
            results.append(bits(model.weight.grad))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return results

    expected = run(lambda: None)
    engine.attach(model)
    assert run(lambda: on_disk(engine)) == expected
    assert run(lambda: None) == expected


def test_second_derivatives_are_the_same(engine: OffloadEngine) -> None:
    x = noise(8, 8, seed=4).requires_grad_()
    model = Calls(lambda w, x: torch.tanh(x @ w).pow(3).sum() + F.softplus(x @ w.T).sum())

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean(), x

    compare(engine, model, step)


def test_autograd_grad_reaches_inputs_outputs_and_what_lies_between(
    engine: OffloadEngine,
) -> None:
    x = noise(8, 8, seed=4).requires_grad_()

    def function(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = (x @ w).exp()
        return middle, middle.sin().sum()

    model = Calls(function)

    def run() -> list[tuple[Any, ...]]:
        middle, loss = model(x)
        grads = torch.autograd.grad(loss, [middle, x, model.weight], retain_graph=True)
        again = torch.autograd.grad([middle, loss], [x], [torch.ones_like(middle), None])
        return [bits(grad) for grad in (*grads, *again)]

    expected = run()
    engine.attach(model)
    assert run() == expected


def test_several_forwards_may_come_before_their_backwards(engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8))
    batches = [noise(4, 8, seed=seed) for seed in range(4)]

    def run(order: list[int], wait: Callable[[], None]) -> list[tuple[Any, ...]]:
        torch.manual_seed(5)
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
        losses = [model(batch).pow(2).sum() for batch in batches]
        wait()
        results = []
        for index in order:
            losses[index].backward()
            results.extend(bits(grad) for grad in gradients(model).values())
        return results

    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        expected = run(order, lambda: None)
        engine.attach(model)
        assert run(order, lambda: on_disk(engine)) == expected
        engine.detach_model(model)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_regions_are_computed_again_as_before(
    engine: OffloadEngine, reentrant: bool
) -> None:
    torch.manual_seed(0)
    region = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.region, self.out = region, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.region, x, use_reentrant=reentrant)
            return checkpoint(self.region, self.out(x).relu(), use_reentrant=reentrant).sum()

    model, x = Model(), noise(4, 8).requires_grad_()
    compare(engine, model, lambda: (model(x), x))


def test_backward_may_run_inside_the_scope(engine: OffloadEngine) -> None:
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    engine.attach(model)
    for _ in range(2):
        model.zero_grad()
        with engine.forward():
            loss = model()
            loss.backward()
        assert_same_bits(gradients(model), expected)


def test_a_scope_covers_work_outside_of_the_model(engine: OffloadEngine) -> None:
    model = nn.Linear(8, 8)
    x, target = noise(4, 8), noise(4, 8, seed=9)

    def run(scope: Any) -> torch.Tensor:
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).exp(), target.softmax(1))
        on_disk(engine)
        loss.backward()
        return loss

    plain = run(nullcontext())
    expected = gradients(model)
    engine.attach(model)
    run(nullcontext())
    without = moved(engine)
    assert bits(run(engine.forward())) == bits(plain)
    assert_same_bits(gradients(model), expected)
    assert moved(engine) - without > without


def test_hooks_of_the_users_own_go_on_working(engine: OffloadEngine) -> None:
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    def function(w: torch.Tensor) -> torch.Tensor:
        y = (X @ w).exp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = y.sin()
        with torch.autograd.graph.save_on_cpu():
            y = y * y
        return y.exp().sum()

    model = Calls(function)
    compare(engine, model, lambda: model())
    assert packed == [64] * 3


def test_a_compiled_model_is_the_same(engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    compiled: Any = torch.compile(model, backend="aot_eager")
    compare(engine, compiled, lambda: compiled(noise(4, 8)).pow(2).sum())
    torch._dynamo.reset()


# ---------------------------------------------------------------------- when nothing leaves
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval", "no gradients"])
def test_nothing_leaves_when_nothing_is_trained(engine: OffloadEngine, how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = noise(4, 8)
    expected = model(x)
    engine.attach(model)
    if how == "eval":
        model.eval()
    if how == "no gradients":
        model.requires_grad_(False)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, nullcontext)():
        assert torch.equal(model(x), expected)
        with engine.forward():
            pass
    assert moved(engine) == moved(engine, verb="forwarded") == 0
    assert engine._resources.heap.live_tickets == 0


def test_training_goes_on_after_an_evaluation_in_between(engine: OffloadEngine) -> None:
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    engine.attach(model)
    model.zero_grad()
    loss = model()
    model.eval()
    with torch.no_grad():
        model()
    model.train()
    loss.backward()
    assert_same_bits(gradients(model), expected)


# ---------------------------------------------------------------------- when things end early
def test_a_graph_that_is_dropped_takes_its_tickets_along(engine: OffloadEngine) -> None:
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    engine.attach(model)
    heap = engine._resources.heap
    for wait in (True, False):
        loss = model()
        assert heap.live_tickets > 0
        if wait:
            on_disk(engine)
        del loss
        assert heap.live_tickets == 0
    heap.wait_for_writes()
    assert engine.metrics()["offload/tier/nvme/used_bytes"] == 0


def test_memory_is_given_back_while_backward_goes_on(engine: OffloadEngine) -> None:
    alive: list[int] = []
    model = Calls(lambda w: _chain(w, lambda: alive.append(engine._resources.heap.live_tickets)))
    engine.attach(model)
    loss = model()
    on_disk(engine)
    before = engine._resources.heap.live_tickets
    loss.backward()
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] < before / 2


def _chain(w: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
    for _ in range(10):
        w = (w * 1).tanh()
        w.register_hook(lambda grad: note())
    return w.sum()


class _Stop(BaseException):
    """As KeyboardInterrupt: no subclass of Exception."""


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, _Stop, GeneratorExit])
@pytest.mark.parametrize("where", ["model", "submodule", "scope"])
def test_an_exception_in_forward_leaves_nothing_behind(
    engine: OffloadEngine, kind: type[BaseException], where: str
) -> None:
    fail = False

    def function(w: torch.Tensor) -> torch.Tensor:
        y = (X @ w).exp()
        if fail:
            raise kind("stop")
        return y.sin().sum()

    inner = Calls(function)
    model = nn.Sequential(inner) if where == "submodule" else inner

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self) -> torch.Tensor:
            return self.inner()

    model = Wrapper() if where == "submodule" else inner
    model().backward()
    expected = gradients(model)
    engine.attach(model)
    for _ in range(2):
        fail = True
        with pytest.raises(kind), engine.forward() if where == "scope" else nullcontext():
            model()
        fail = False
        model.zero_grad()
        model().backward()
        assert_same_bits(gradients(model), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert engine._resources.heap.live_tickets == 0


def test_an_interrupt_in_forward_and_then_close_leaves_no_hooks(disk: Path) -> None:
    def function(w: torch.Tensor) -> torch.Tensor:
        (X @ w).exp()
        raise KeyboardInterrupt

    model = Calls(function)
    with activations_only(disk) as engine:
        engine.attach(model)
        with pytest.raises(KeyboardInterrupt):
            model()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_backward_after_closing_is_right_or_says_what_is_gone(disk: Path) -> None:
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    model.zero_grad()
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
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    model.zero_grad()
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
    import os

    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    model.zero_grad()
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
    model = Calls(lambda w: (X @ w).exp().sin().sum())
    model().backward()
    expected = gradients(model)
    model.zero_grad()
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
        host = resources.host_tiers["host"]
        tickets = {
            id(entry): entry
            for _, entry in resources.heap._ledger._tickets.values()
            if entry.nbytes == 32 * 1024
        }
        order = sorted(tickets.values(), key=lambda entry: entry.next_use or 0)
        assert len(order) >= 8
        assert [entry.tier is host for entry in order[:3]] == [True] * 3
        assert not any(entry.tier is host for entry in order[3:])
        loss.backward()


# ---------------------------------------------------------------------- threads
def test_two_threads_may_run_the_same_model(engine: OffloadEngine) -> None:
    """One trains in the middle of its forward while the other evaluates, begins and ends."""
    inside, go_on = threading.Event(), threading.Event()

    def function(w: torch.Tensor, pause: bool) -> torch.Tensor:
        y = (X @ w).exp()
        if pause:
            inside.set()
            go_on.wait(30)
        return y.sin().sum()

    model = Calls(function)
    model(False).backward()
    expected = gradients(model)
    model.zero_grad()
    engine.attach(model)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            loss = model(True)
            on_disk(engine)
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    assert inside.wait(30)
    with torch.no_grad():
        model(False)
    other = model(False)
    go_on.set()
    thread.join(30)
    assert errors == []
    assert_same_bits(gradients(model), expected)
    model.zero_grad()
    other.backward()
    assert_same_bits(gradients(model), expected)
    assert moved(engine) > 0
