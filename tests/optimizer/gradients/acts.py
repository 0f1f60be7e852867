"""What users do with gradients, by kind: done to a plain gradient and to an offloaded one."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

#: Changes its argument and, like the collectives of c10d, does not declare it.
_LIBRARY = torch.library.Library("offload_strategy_tests", "FRAGMENT")
_LIBRARY.define("halve(Tensor[] tensors) -> Tensor[]")
_LIBRARY.impl(
    "halve", lambda tensors: [each.mul_(0.5) for each in tensors], "CompositeExplicitAutograd"
)


def halved(g: torch.Tensor) -> Any:
    """What an operator returns that changes the gradient without declaring it."""
    (result,) = torch.ops.offload_strategy_tests.halve([g])
    return result


def through_torch_save(g: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(g, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is torch.Tensor
    return loaded


def copied_with_a_row(g: torch.Tensor) -> torch.Tensor:
    """Copies of what shares memory share theirs."""
    row, whole = copy.deepcopy((g[1], g))
    row.fill_(7)
    return whole


def times_what_changes(g: torch.Tensor) -> None:
    """A factor of the time, whatever becomes of it."""
    factor = torch.tensor(0.5)
    g.mul_(factor)
    factor.fill_(3.0)


def unscaled(g: torch.Tensor, inverse: float) -> float:
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([g], found, torch.tensor(inverse))
    return float(found)


def with_gradient(g: torch.Tensor) -> nn.Parameter:
    """A parameter with this gradient, which is dense but maybe transposed."""
    parameter = nn.Parameter(torch.empty_like(g))
    parameter.grad = g
    assert parameter.grad is g
    return parameter


#: What takes a copy, or a figure: the values stay where they are.
READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda g: g.clone(),
    "to another dtype": lambda g: g.to(torch.float64, copy=True),
    "arithmetic": lambda g: 2 * g + g / 3 - g**2,
    "a product": lambda g: g @ g.new_ones(g.shape[1]),
    "extremes": lambda g: [g.max(), g.min(), g.argmax(), g.aminmax(), g.abs().max()],
    "sums": lambda g: [g.sum(), g.mean(), g.pow(2).sum(), g.std(), g.sum(0)],
    "equality": lambda g: [torch.equal(g, g.clone()), torch.allclose(g, g.clone())],
    "full like it": lambda g: [torch.full_like(g, 3.0), torch.zeros_like(g), g.new_full((2,), 5)],
    "empty like it": lambda g: [torch.empty_like(g).stride(), g.new_empty(3).dtype],
    "like it in another dtype": lambda g: torch.zeros_like(g, dtype=torch.int64),
    "concatenated": lambda g: torch.cat([g, torch.ones_like(g)]),
    "indexed and sorted": lambda g: [g[g > 0], g[[0, 2, 1]], g.sort()],
    "lists": lambda g: torch._foreach_mul([g, g], 2.0),
    "into another": lambda g: torch.empty_like(g).copy_(g),
    "assigned into another": lambda g: torch.ones(2, *g.shape, dtype=g.dtype).index_put_(
        (torch.tensor([1]),), g
    ),
    "norms": lambda g: [g.norm(2, dim=0), g.norm("fro"), torch.linalg.norm(g)],
    "a norm of another dtype": lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.float64),
    "a norm into another": lambda g: torch.linalg.vector_norm(g, 2, out=g.new_empty(())),
    "listed norms": lambda g: torch._foreach_norm([g, torch.ones(3), g], ord=1),
    "tolist": lambda g: g.tolist(),
    "repr": lambda g: repr(g),
    "deepcopy": lambda g: copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "torch.save": through_torch_save,
    "random like it": lambda g: (torch.manual_seed(3), torch.rand_like(g), torch.randn_like(g))[1:],
    "classes": lambda g: [len(g), isinstance(g, torch.Tensor), torch.is_tensor(g), g is None],
    "bool": lambda g: bool(g),
    "contiguous": lambda g: g.contiguous().sum(),
    "unchanged by to": lambda g: g.to(g.dtype) is g and g.cpu() is g,
    "not of its shape": lambda g: g + torch.ones(3),
    "not a scalar": lambda g: g.item(),
}

#: What hands out memory, or changes it otherwise than by a step.
PINS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda g: g.float().numpy() if g.dtype is torch.bfloat16 else g.numpy(),
    "written through numpy": lambda g: (
        g.view(torch.uint8 if g.is_contiguous() else g.dtype).numpy().fill(3)
        if g.dtype is not torch.bfloat16
        else None
    ),
    "view": lambda g: g.t().contiguous().view(-1) if not g.is_contiguous() else g.view(-1),
    "changed through a view of a view": lambda g: g.t()[1:].add_(1),
    "rows": lambda g: [row.sum() for row in g],
    "assigned": lambda g: g.__setitem__((slice(None), 1), 5.0),
    "assigned by a mask": lambda g: g.__setitem__(g < 0, 0.0),
    "added and kept": lambda g: g.__iadd__(2.0),
    "multiplied by a tensor": lambda g: g.mul_(torch.full_like(g, 0.3)),
    "rounded down": lambda g: g.div_(0.3, rounding_mode="floor"),
    "filled": lambda g: g.fill_(3.0),
    "filled by a tensor": lambda g: g.fill_(torch.tensor(3.0)),
    "copied into": lambda g: g.copy_(torch.arange(g.shape[1])),
    "copied from itself": lambda g: g.copy_(g),
    "copied from its transpose": lambda g: g[:5, :5].copy_(g.t()[:5, :5]),
    "added what does not fit": lambda g: g.add_(torch.ones(3)),
    "as an output": lambda g: torch.add(torch.ones_like(g), 1, out=g),
    "as an output of itself": lambda g: torch.mul(g, g, out=g),
    "listed and added": lambda g: torch._foreach_add_([g, torch.ones_like(g)], [g.clone(), g]),
    "listed, by numbers": lambda g: torch._foreach_mul_([g], [0.3]),
    "diagonal": lambda g: g.diagonal().zero_(),
    "transposed in place": lambda g: g.t_(),
    "resized": lambda g: g.unsqueeze_(0),
    "dlpack": lambda g: torch.from_dlpack(g),
    "as_tensor": lambda g: torch.as_tensor(g).mul_(torch.full_like(g, 3.0)),
    "copy": lambda g: copy.copy(g).add_(1),
    "deepcopy with a row": copied_with_a_row,
    "changed without being declared": halved,
    "size of its storage": lambda g: g.untyped_storage().nbytes(),
    "address": lambda g: g.data_ptr() % 8,
    "shared": lambda g: (g.share_memory_() is g, g.is_shared()),
    "set from another": lambda g: g.set_(torch.ones(3, 5, dtype=g.dtype)),
    "another is set from it": lambda g: torch.empty(0, dtype=g.dtype).set_(g).add_(1),
    "data set": lambda g: setattr(g, "data", torch.ones_like(g)),
    "data set to another shape": lambda g: setattr(g, "data", torch.ones(4, 2, dtype=g.dtype)),
    "data set to another dtype": lambda g: setattr(g, "data", g.double()),
    "vectorised": lambda g: nn.utils.parameters_to_vector([g if g.is_contiguous() else g.t()]),
    "from a vector": lambda g: nn.utils.vector_to_parameters(torch.ones(g.numel()), [g]),
    "a subclass": lambda g: g.as_subclass(torch.Tensor).add_(1),
}

#: What shares the values without anything to look at.
ALIASES: dict[str, Callable[[Any], Any]] = {
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "data of data": lambda g: g.data.detach().data,
}

#: What is written down.
STEPS: dict[str, Callable[[Any], Any]] = {
    "times a number": lambda g: g.mul_(0.3),
    "times a tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "times a double": lambda g: g.mul_(torch.tensor(0.3, dtype=torch.float64)),
    "times a tensor that changes": times_what_changes,
    "by a number": lambda g: g.div_(3),
    "operator by": lambda g: g.__itruediv__(7.0),
    "clamped": lambda g: g.clamp_(-0.2, 0.3),
    "clamped above": lambda g: g.clamp_(max=0.3),
    "clamped below": lambda g: g.clamp_min_(-0.3),
    "clamped by a tensor": lambda g: g.clamp_max_(torch.tensor(0.1, dtype=g.dtype)),
    "listed": lambda g: torch._foreach_mul_([g], 0.3),
    "listed twice": lambda g: torch._foreach_mul_([g, g], 0.7),
    "listed with a plain one": lambda g: torch._foreach_div_([torch.ones(3), g], 0.7),
    "listed, clamped below": lambda g: torch._foreach_clamp_min_([g], -0.1),
    "listed, clamped above": lambda g: torch._foreach_clamp_max_([g], 0.1),
    "through data": lambda g: g.data.mul_(0.3),
    "by its norm": lambda g: g.div_(g.norm()),
    "times what overflows": lambda g: g.mul_(1e30).mul_(1e30),
    "times NaN": lambda g: g.mul_(float("nan")),
    "unscaled": lambda g: unscaled(g, 1 / 3),
    "clipped by value": lambda g: nn.utils.clip_grad_value_(with_gradient(g), 0.1),
    "clipped one by one": lambda g: nn.utils.clip_grad_value_(with_gradient(g), 0.1, foreach=False),
    "clipped by norm": lambda g: nn.utils.clip_grad_norm_(with_gradient(g), 0.1),
    "refused": lambda g: g.clamp_(),
    "refused for its limit": lambda g: g.clamp_(1e300),
}


def scaled(g: Any) -> None:
    g.mul_(0.3)
    torch._foreach_clamp_min_([g], -0.2)


PREPARED: dict[str, Callable[[Any], Any]] = {"as it came": lambda g: None, "with steps": scaled}
