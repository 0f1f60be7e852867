"""What stays, and why: weights in every form, and what is more than its bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from offload_strategy.activations.eligibility import (
    Stays,
    UnsupportedTensors,
    why_it_stays,
)
from offload_strategy.weights.parameter_registry import ParameterRegistry
from tests.activations.support import noise


class Quantized(torch.Tensor):
    """A weight of eight-bit integers and a scale, as libraries of quantization make them."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Quantized:
        scale = tensor.abs().amax() / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        return self.integers * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Quantized:
        return Quantized(inner["integers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return type(args[0])(function(args[0].integers), args[0].scale)
        plain = tree_map(lambda x: x.plain() if isinstance(x, Quantized) else x, (args, kwargs))
        return function(*plain[0], **(plain[1] or {}))


class Model(nn.Module):
    """Weights of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.quantized = nn.Parameter(Quantized.of(torch.randn(8, 8)), requires_grad=False)
        inner = Quantized.of(torch.ones(4, 4))
        self.sharded = nn.Parameter(Quantized(inner, torch.tensor(0.5)), requires_grad=False)
        self.register_buffer("mask", torch.ones(8, 8))
        self.register_buffer("table", torch.ones(8, 8), persistent=False)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def registry(model: Model) -> Iterator[ParameterRegistry]:
    registry = ParameterRegistry()
    registry.add_module(model)
    registry.refresh()
    yield registry
    registry.remove_module(model)


WEIGHTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "a parameter": lambda m: m.weight,
    "a detached alias": lambda m: m.weight.detach(),
    "its transpose": lambda m: m.weight.t(),
    "a slice of a view": lambda m: m.weight.view(4, 16)[1:, ::2],
    "expanded": lambda m: m.weight[0].expand(100, 8),
    "a frozen one": lambda m: m.frozen.t(),
    "a buffer": lambda m: m.mask[2:],
    "a buffer that is not saved": lambda m: m.table,
    "a quantized one": lambda m: m.quantized,
    "a transpose of a quantized one": lambda m: m.quantized.t(),
    "integers of a quantized one": lambda m: m.quantized.integers,
    "a view of them": lambda m: m.quantized.data.integers.view(-1)[3:],
    "its scale": lambda m: m.quantized.scale,
    "what a wrapper within a wrapper holds": lambda m: m.sharded.integers.integers,
    "a lower precision": lambda m: m.weight.bfloat16(),
    "a transpose of it": lambda m: m.weight.bfloat16().t(),
    "the transpose in it": lambda m: m.weight.t().half(),
    "a slice in it, viewed": lambda m: m.weight[2:4].double().view(-1),
    "a parameter that was made on the way": lambda m: nn.Parameter(torch.ones(8)),
    "a view of such": lambda m: nn.Parameter(torch.ones(8, 2)).t(),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_it_is_a_weight(kind: str, model: Model, registry: ParameterRegistry) -> None:
    tensor = WEIGHTS[kind](model)
    assert why_it_stays(tensor, registry.is_weight) is Stays.WEIGHT


OTHERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "something computed from it": lambda m: m.weight * 1,
    "a lower precision of that": lambda m: (m.weight * 1).bfloat16(),
    "an expanded weight in lower precision": lambda m: m.weight[0].expand(100, 8).bfloat16(),
    "an input": lambda m: torch.ones(8, requires_grad=True),
    "an input in lower precision": lambda m: torch.ones(8, requires_grad=True).bfloat16(),
    "a conjugate": lambda m: torch.ones(4, dtype=torch.complex64).conj(),
    "a scalar": lambda m: m.weight.sum(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_it_is_no_weight_and_leaves(kind: str, model: Model, registry: ParameterRegistry) -> None:
    tensor = OTHERS[kind](model)
    assert why_it_stays(tensor, registry.is_weight) is None


def _given_up() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


REASONS: dict[str, tuple[Stays, Callable[[], torch.Tensor]]] = {
    "a subclass": (Stays.SUBCLASS, lambda: Quantized.of(noise(4, 4))),
    "sparse": (Stays.LAYOUT, lambda: torch.eye(4).to_sparse()),
    "compressed sparse": (Stays.LAYOUT, lambda: torch.eye(4).to_sparse_csr()),
    "opaque": (Stays.LAYOUT, lambda: torch.eye(4).to_mkldnn()),
    "nested": (Stays.NESTED, lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": (
        Stays.SUBCLASS,
        lambda: torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        ),
    ),
    "quantized": (
        Stays.QUANTIZED, lambda: torch.quantize_per_tensor(noise(4, 4), 0.1, 0, torch.qint8)
    ),
    "without data": (Stays.EMPTY, lambda: torch.empty(4, device="meta")),
    "without elements": (Stays.EMPTY, lambda: torch.empty(4, 0)),
    "zeros that only say so": (Stays.EMPTY, lambda: torch._efficientzerotensor(4)),
    "without its memory": (Stays.EMPTY, _given_up),
    "of an inference": (Stays.INFERENCE, _inference),
}  # fmt: skip


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # that some kinds are in beta or on their way
def test_it_stays_and_the_reason_is_told(kind: str, registry: ParameterRegistry) -> None:
    reason, make = REASONS[kind]
    assert why_it_stays(make(), registry.is_weight) is reason


def test_what_a_transform_wraps_stays(registry: ParameterRegistry) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(why_it_stays(x, registry.is_weight))
        return x.sum()

    torch.func.vmap(torch.func.grad(function))(noise(4, 4))
    assert seen == [Stays.TRANSFORM]


def test_an_address_means_nothing_once_its_weight_is_gone() -> None:
    registry, model = ParameterRegistry(), nn.Linear(4, 4, bias=False)
    registry.add_module(model)
    registry.refresh()
    (reference,) = registry._storages.values()
    other = torch.empty(4, 4)
    # The allocator gives the address to somebody else, now or later.
    registry._storages[other.untyped_storage()._cdata] = reference
    assert not registry.is_weight(other)
    assert registry.is_weight(model.weight)
    del model
    assert reference() is None
    assert not registry.is_weight(other)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_what_stays_is_counted_and_each_kind_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = UnsupportedTensors()
    with caplog.at_level(logging.INFO, "offload_strategy"):
        counts.note(Stays.WEIGHT, noise(4), 0)
        counts.note(Stays.EMPTY, noise(0), 0)
        assert not caplog.records
        for _ in range(3):
            counts.note(Stays.SUBCLASS, Quantized.of(noise(8, 8)), 0)
            counts.note(Stays.LAYOUT, torch.eye(4).to_sparse(), 0)
            counts.note(Stays.LAYOUT, torch.eye(4).to_sparse_csr(), 0)
            counts.note(Stays.QUANTIZED, REASONS["quantized"][1](), 1000)
    assert counts.nbytes == 3 * (64 + 4) + 3 * 80 + 3 * 88 + 3 * 16
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "test_eligibility.Quantized (68 B) stays in memory" in said[0]
    assert "torch.sparse_coo" in said[1]
    assert "torch.sparse_csr" in said[2]
