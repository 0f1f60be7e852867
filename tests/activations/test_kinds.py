"""Saved tensors of every kind come back with the very bits, each storage once, or have to stay."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from offload_strategy.activations.eligibility import Stays, UnsupportedTensors, why_it_stays
from offload_strategy.weights.parameter_registry import ParameterRegistry
from tests.activations.support import Calls, Saves, X, compare, noise, with_gradients, written
from tests.training import activations_only, assert_same_bits, bits, gradients, on_disk

#: What torch's own samples of operators (tests/conformance) do not have.
FUNCTIONS = {
    "transposed and strided views": lambda w: ((w * 2).t()[::2, 1:].exp() * w[:4, :7]).sum(),
    "views of one buffer": lambda w: torch.stack(
        [(part * part).sin().prod() for part in (w @ X).chunk(4)]
    ).sum(),
    "expanded tensors": lambda w: (w.sum(0).exp().expand(8, 8) * w).prod(1).sum(),
    "a scalar": lambda w: (w.sum().exp() * w).sin().sum(),
    "nothing at all": lambda w: (w[:0].exp().sum() + w.exp()).sum(),
    "complex conjugates": lambda w: (
        (torch.view_as_complex(w.reshape(8, 4, 2) * 1).conj() ** 3).exp().imag.sum()
    ),
    "negatives that are put off": lambda w: (
        (torch.view_as_complex(w.reshape(8, 4, 2) * 1).conj().imag[1:] ** 3).exp().sum()
    ),
    "real parts of slices": lambda w: _parts_of_complex(w).sum(),
    "infinities and NaN": lambda w: (
        (w.detach() > 9e9).float() + (w - w).log() * w.clamp(0.1)
    ).nansum() + (w * float("nan")).exp().sum(),
    "channels last": lambda w: F.conv2d(
        noise(2, 8, 5, 5).contiguous(memory_format=torch.channels_last), w.reshape(8, 8, 1, 1)
    ).exp().sum(),
    "in-place relu": lambda w: F.relu(F.relu(X @ w, inplace=True) @ w, inplace=True).sum(),
    "a change between two that save it": lambda w: _changed_in_between(w * 2),
    "a change before it is saved": lambda w: (w * 2).mul_(3).exp_().sin().sum(),
    "compressed sparse matrices": lambda w: (torch.eye(8).to_sparse_csr() @ (w * 2)).exp().sum(),
    "opaque layouts": lambda w: F.linear(X, w).to_mkldnn().relu().to_dense().exp().sum(),
    "nested tensors": lambda w: torch.nested.as_nested_tensor(
        [(X[:3] @ w).relu(), (X[:5] @ w).relu()]
    ).mul(2).relu().to_padded_tensor(0.0).exp().sum(),
    "jagged tensors": lambda w: torch.nested.as_nested_tensor(
        [X[:3] @ w, X[:5] @ w], layout=torch.jagged
    ).exp().sin().to_padded_tensor(0.0).sum(),
    "vmap": lambda w: torch.func.vmap(lambda row: (row.exp() * (w @ row)).sum())(X @ w).sum(),
    # Transforms inside of a model: before them and after them things are saved as ever.
    "grad": lambda w: torch.func.grad(lambda v: (v.sin() * (w * 2).exp()).sum())(w * 1),
    "vjp": lambda w: torch.func.vjp(lambda v: v.sin() * w, w * 1)[1](torch.ones(8, 8))[0],
    "jacrev": lambda w: torch.func.jacrev(lambda v: (v @ w).sin().sum(0))(X),
    "jvp": lambda w: torch.func.jvp(lambda v: (v @ w).sin(), (X,), (X * 2,))[1],
    "hessian": lambda w: torch.func.hessian(lambda v: (v @ w).sin().sum())(X[0]),
    "vmap of grad": lambda w: torch.func.vmap(
        torch.func.grad(lambda row: (row @ w).exp().sum())
    )(X),
    "grad of grad": lambda w: torch.func.vmap(
        torch.func.grad(torch.func.grad(lambda v: (v.sin() * v).exp()))
    )((w * 1).view(-1)),
    "functionalize": lambda w: torch.func.functionalize(lambda v: v.sin().mul_(2).exp())(w * 2),
    "a transform that fails": lambda w: _failing_transform(w) + (X @ w).exp(),
    "a Jacobian of autograd's own": lambda w: torch.autograd.functional.jacobian(
        lambda v: (v @ w).sin().sum(0), X, create_graph=True
    ),
    "gradients in between": lambda w: torch.autograd.grad(
        (w * 2).exp().sum(), w, create_graph=True
    )[0],
}  # fmt: skip


def _parts_of_complex(w):
    # The imaginary parts begin four bytes into the numbers: no offset in whole numbers exists
    # for the slice that is saved next.
    storage = torch.view_as_complex(torch.cat([w, w, w, w]).reshape(-1, 2) * 1.5)
    part = storage[5:15]
    return (part.imag.exp() * part.imag).sum() + (part[1:] * part[:-1].abs()).abs()


def _failing_transform(w):
    with pytest.raises(RuntimeError, match="scalar"):
        torch.func.grad(lambda v: v.sin())(w)
    return w * 2


def _changed_in_between(y):
    with torch.no_grad():
        first = (y.detach().clone().requires_grad_() * y).sum()
        y += 1
    return (y * y).sum() + first


_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),  # which older versions of torch do not know
)
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_in_every_arrangement(dtype, engine):
    anything = torch.randint(0, 2 if dtype is torch.bool else 256, (24 * dtype.itemsize,))
    plain = anything.to(torch.uint8).view(dtype).view(4, 6)
    saved = [plain, plain.t(), plain[1:3, ::2], plain[0].expand(5, 6), plain[0, 0], plain[:, :0]]
    saved += [plain.clone()[2:], plain.t().clone().unsqueeze(0), torch.empty(0, dtype=dtype)]
    if dtype.is_complex:
        part = plain.clone()[1:]  # of which bytes of their own are taken along
        saved += [plain.conj(), plain.clone().conj().t(), plain.conj().imag, plain.real]
        saved += [part[:, ::2].conj().t(), part[1:].conj().imag[:, 1:], part[2:].imag]
        saved.append(part[0, 1].expand(4, 3))
        if dtype is not torch.complex32:  # for which torch cannot compute the values of both
            saved.append(torch._neg_view(part[1]).conj())

    class Save(torch.autograd.Function):
        """An identity that saves tensors, and compares them in backward with what it was given."""

        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for got, given in zip(ctx.saved_tensors, saved, strict=True):
                assert got.stride() == given.stride()
                assert (got.is_conj(), got.is_neg()) == (given.is_conj(), given.is_neg())
                assert bits(got) == bits(given)
            return grad, *([None] * len(saved))

    compare(engine, Calls(lambda w: Save.apply((X @ w).exp(), *saved).sum()))
    assert 24 * dtype.itemsize in written(engine)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) st:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_gradients_are_the_same_with(name, engine):
    compare(engine, Calls(lambda w: FUNCTIONS[name](w).sum() + (X @ w).exp().sin().sum()))
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


# ---------------------------------------------------------------------- views
DATA = noise(1000, 8)


def _attention(w):
    whole = X @ w  # 256 bytes
    q, k, v = whole[:, :3], whole[:, 2:6], whole[:, 4:]
    return (q * q).sum() + (k * k).exp().sum() + (v * whole[:, :4]).sum() + (whole**2).sum()


def _parts_of_a_product(w):
    with torch.no_grad():
        whole = w @ X
    parts = [whole[:, :3].data, whole[:, 3:5].data, whole[:, 5:].data]
    assert all(part._base is None for part in parts)
    return Saves.apply(w * 1, *parts).sum()


#: And the sizes of what leaves; weights stay.
VIEWS = {
    "views of a product": (_attention, [128, 256, 256]),  # and x, and what exp saved of itself
    "views without a base": (_parts_of_a_product, [256]),  # as a compiled region saves them
    "a small view of a large storage": (lambda w: (DATA[10:20] @ w).sum(), [10 * 8 * 4]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_one_storage_is_written_and_read_once(name, engine):
    function, sizes = VIEWS[name]
    model, expected = with_gradients(function, engine)
    loss = model()
    on_disk(engine)
    assert written(engine) == sizes
    loss.backward()
    assert engine.metrics()["offload/activations/step_saved_bytes"] == sum(sizes)
    read = [record.nbytes for record in engine._recorder.moves if record.direction == "read"]
    assert sorted(read) == sizes
    assert_same_bits(gradients(model), expected)


def test_loaded_bytes_go_when_their_last_view_was_used(engine):
    model = Calls(lambda w: [(part.exp() * part).sum() for part in (X @ w * 1.5).chunk(4)])
    engine.attach(model)
    parts = model()
    on_disk(engine)
    for part in parts:
        part.backward(retain_graph=True)
    assert engine.metrics()["offload/memory/pinned_bytes"] > 0
    assert engine._resources.pool.usage().lent_bytes == 0, "something is still in memory"


@pytest.mark.parametrize(
    ("options", "leave"),
    [
        ({"min_size": 257}, []),
        ({"min_size": 256}, [256, 256]),
        ({"budget": 0}, []),
        ({"budget": 300}, [256]),
        ({"budget": "50%"}, [128, 128]),
        ({"budget": "100%"}, [128, 128, 256, 256]),
    ],
)
def test_the_options_say_what_leaves(disk, options, leave):
    def function(w):
        y = torch.exp(w * 1)  # saved: 256 bytes, after w, which stays
        z = torch.exp(y[:4] * 1)  # 128
        u = torch.exp(z * 1)  # 128
        return torch.exp(torch.cat([z, u]) * 1).sum()  # 256

    with activations_only(disk, **options) as engine:
        model, grads = with_gradients(function, engine)
        loss = model()
        on_disk(engine)
        assert written(engine) == leave
        loss.backward()
        assert_same_bits(gradients(model), grads)


# ---------------------------------------------------------------------- what stays, and why
def wrapper():
    """A tensor that consists of others, as those of libraries of quantization."""
    return TwoTensor(torch.randn(8, 8), torch.randn(8, 8))


class Model(nn.Module):
    """Weights of every kind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.wrapper = nn.Parameter(wrapper(), requires_grad=False)
        self.wrappers = nn.Parameter(TwoTensor(wrapper(), wrapper()), requires_grad=False)
        self.register_buffer("mask", torch.ones(8, 8))
        self.register_buffer("table", torch.ones(8, 8), persistent=False)


def quantized():
    return torch.quantize_per_tensor(noise(4, 4), 0.1, 0, torch.qint8)


def registry_of(model):
    registry = ParameterRegistry()
    registry.add_module(model)
    registry.refresh()
    return registry


def _given_up(_):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _inference():
    with torch.inference_mode():
        return torch.ones(4)


def _wrapped():
    seen = []
    torch.func.vmap(lambda x: seen.append(x) or x)(torch.ones(4))
    return seen[0]


def _nested(layout=torch.strided):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


KINDS = {
    Stays.WEIGHT: {
        "a parameter": lambda m: m.weight,
        "a detached alias": lambda m: m.weight.detach(),
        "its transpose": lambda m: m.weight.t(),
        "a slice of a view": lambda m: m.weight.view(4, 16)[1:, ::2],
        "expanded": lambda m: m.weight[0].expand(100, 8),
        "a frozen one": lambda m: m.frozen.t(),
        "a buffer": lambda m: m.mask[2:],
        "a buffer that is not saved": lambda m: m.table,
        "a wrapper of two tensors": lambda m: m.wrapper,
        "a transpose of it": lambda m: m.wrapper.t(),
        "what it holds": lambda m: m.wrapper.a,
        "a view of what it holds": lambda m: m.wrapper.data.a.view(-1)[3:],
        "what it holds besides": lambda m: m.wrapper.b,
        "what a wrapper within a wrapper holds": lambda m: m.wrappers.a.b,
        "a lower precision": lambda m: m.weight.bfloat16(),
        "a transpose in lower precision": lambda m: m.weight.bfloat16().t(),
        "the transpose in it": lambda m: m.weight.t().half(),
        "a slice in it, viewed": lambda m: m.weight[2:4].double().view(-1),
        "a parameter that was made on the way": lambda m: nn.Parameter(torch.ones(8)),
        "a view of such": lambda m: nn.Parameter(torch.ones(8, 2)).t(),
    },
    None: {
        "something computed from it": lambda m: m.weight * 1,
        "a lower precision of that": lambda m: (m.weight * 1).bfloat16(),
        "an expanded weight in lower precision": lambda m: m.weight[0].expand(100, 8).bfloat16(),
        "an input": lambda m: torch.ones(8, requires_grad=True),
        "an input in lower precision": lambda m: torch.ones(8, requires_grad=True).bfloat16(),
        "a conjugate": lambda m: torch.ones(4, dtype=torch.complex64).conj(),
        "a scalar": lambda m: m.weight.sum(),
    },
    Stays.SUBCLASS: {"a subclass": lambda m: wrapper(), "jagged": lambda m: _nested(torch.jagged)},
    Stays.LAYOUT: {
        "sparse": lambda m: torch.eye(4).to_sparse(),
        "compressed sparse": lambda m: torch.eye(4).to_sparse_csr(),
        "opaque": lambda m: torch.eye(4).to_mkldnn(),
    },
    Stays.NESTED: {"nested": lambda m: _nested()},
    Stays.QUANTIZED: {"quantized": lambda m: quantized()},
    Stays.EMPTY: {
        "without data": lambda m: torch.empty(4, device="meta"),
        "without elements": lambda m: torch.empty(4, 0),
        "zeros that only say so": lambda m: torch._efficientzerotensor(4),
        "without its memory": _given_up,
    },
    Stays.INFERENCE: {"of an inference": lambda m: _inference()},
    Stays.TRANSFORM: {"what a transform wraps": lambda m: _wrapped()},
}


@pytest.mark.parametrize("reason", KINDS)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # that some kinds are in beta or on their way
def test_why_it_stays_or_that_it_leaves(reason):
    model, kinds = Model(), KINDS[reason]
    registry = registry_of(model)
    found = {name: why_it_stays(make(model), registry.is_weight) for name, make in kinds.items()}
    assert found == dict.fromkeys(kinds, reason)


def test_an_address_means_nothing_once_its_weight_is_gone():
    model = nn.Linear(4, 4, bias=False)
    registry = registry_of(model)
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
def test_what_stays_is_counted_and_each_kind_named_once(caplog):
    counts = UnsupportedTensors()
    with caplog.at_level(logging.INFO, "offload_strategy"):
        counts.note(Stays.WEIGHT, noise(4), 0)
        counts.note(Stays.EMPTY, noise(0), 0)
        assert not caplog.records
        for _ in range(3):
            counts.note(Stays.SUBCLASS, wrapper(), 0)
            counts.note(Stays.LAYOUT, torch.eye(4).to_sparse(), 0)
            counts.note(Stays.LAYOUT, torch.eye(4).to_sparse_csr(), 0)
            counts.note(Stays.QUANTIZED, quantized(), 1000)
    assert counts.nbytes == 3 * 2 * 256 + 3 * 80 + 3 * 88 + 3 * 16
    told = ("two_tensor.TwoTensor (512 B) stays in memory", "torch.sparse_coo", "torch.sparse_csr")
    for said, words in zip(caplog.messages, told, strict=True):
        assert words in said
