"""Saved tensors of every kind come back with the very bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload_strategy import OffloadEngine
from tests.activations.support import Calls, X, compare, noise, written
from tests.training import bits

#: What torch's own samples of operators (tests/conformance) do not have.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
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
    "a Jacobian of autograd's own": lambda w: torch.autograd.functional.jacobian(
        lambda v: (v @ w).sin().sum(0), X, create_graph=True
    ),
    "gradients in between": lambda w: torch.autograd.grad(
        (w * 2).exp().sum(), w, create_graph=True
    )[0],
}  # fmt: skip


def _parts_of_complex(w: torch.Tensor) -> torch.Tensor:
    # The imaginary parts begin four bytes into the numbers: no offset in whole numbers exists
    # for the slice that is saved next.
    storage = torch.view_as_complex(torch.cat([w, w, w, w]).reshape(-1, 2) * 1.5)
    part = storage[5:15]
    return (part.imag.exp() * part.imag).sum() + (part[1:] * part[:-1].abs()).abs()


def _save(*others: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """An identity that saves tensors, and compares them in backward with what it was given."""

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*saved)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            for got, given in zip(ctx.saved_tensors, others, strict=True):
                assert got.stride() == given.stride()
                assert (got.is_conj(), got.is_neg()) == (given.is_conj(), given.is_neg())
                assert bits(got) == bits(given)
            return grad, *([None] * len(others))

    return lambda x: Save.apply(x, *others)


_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),  # which older versions of torch do not know
)
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_in_every_arrangement(
    dtype: torch.dtype, engine: OffloadEngine
) -> None:
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
    save = _save(*saved)
    model = Calls(lambda w: save((X @ w).exp()).sum())
    compare(engine, model, lambda: model())
    assert 24 * dtype.itemsize in written(engine)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype) st:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_gradients_are_the_same_with(name: str, engine: OffloadEngine) -> None:
    model = Calls(lambda w: FUNCTIONS[name](w).sum() + (X @ w).exp().sin().sum())
    compare(engine, model, lambda: model())
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        return x if depth == 0 else self(x, depth - 1) * x


def test_gradients_are_the_same_through_a_module_that_calls_itself(engine: OffloadEngine) -> None:
    torch.manual_seed(0)
    model, x = _Recursive(), noise(3, 8).requires_grad_()
    compare(engine, model, lambda: (model(x).pow(2).sum(), x))
