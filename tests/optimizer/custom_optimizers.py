"""Optimizers outside of torch: some are supported, and many are not, for the reasons given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam


class Bytes(torch.Tensor):
    """Numbers as multiples of a scale for each block, in one byte each.

    Like quantized states of other packages it does nothing that its optimizer does not need. With
    `nested`, its scales are rounded as well.
    """

    BLOCK = 16

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes = codes
        self.scale = scale

    @classmethod
    def zeros_like(cls, p: torch.Tensor, nested: bool = True) -> Bytes:
        scale = p.new_zeros(p.numel() // cls.BLOCK)
        rounded = cls.zeros_like(scale, False) if nested and scale.numel() >= cls.BLOCK else scale
        return cls(torch.zeros_like(p, dtype=torch.float8_e4m3fn), rounded)

    def values(self) -> torch.Tensor:
        scale = self.scale.values() if isinstance(self.scale, Bytes) else self.scale
        return (self.codes.float().view(-1, self.BLOCK) * scale[:, None]).view(self.codes.shape)

    def set(self, values: torch.Tensor) -> None:
        blocks = values.reshape(-1, self.BLOCK)
        scale = blocks.abs().amax(1) / 8
        if isinstance(self.scale, Bytes):
            self.scale.set(scale)
            scale = self.scale.values()
        else:
            self.scale.copy_(scale)
        codes = blocks / scale[:, None].clamp_min(1e-12)
        self.codes.copy_(codes.clamp(-448, 448).view(values.shape))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Bytes:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            inner = [getattr(args[0], name) for name in ("codes", "scale")]
            return cls(*(tensor.to((kwargs or {}).get("device")) for tensor in inner))
        raise NotImplementedError(f"{cls.__name__} dispatch: {func}")


class QuantizedMomentum(Optimizer):
    """Momentum in bytes where there are enough elements; with `replace`, in new ones each step."""

    def __init__(self, params: Any, lr: float = 1e-2, replace: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.replace = replace

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                large = p.numel() >= 4096 and p.numel() % Bytes.BLOCK == 0
                if not self.state[p]:
                    zeros = Bytes.zeros_like(p) if large else torch.zeros_like(p)
                    self.state[p] = {"step": 0, "momentum": zeros}
                state = self.state[p]
                state["step"] += 1
                old = state["momentum"].values() if large else state["momentum"]
                momentum = old.lerp(p.grad, 0.1)
                if large and self.replace:
                    state["momentum"] = Bytes.zeros_like(p)
                (state["momentum"].set if large else state["momentum"].copy_)(momentum)
                p.sub_(momentum, alpha=group["lr"])


def _quantized(package: str, name: str) -> Callable[..., Optimizer]:
    def make(model: nn.Module, **options: Any) -> Optimizer:
        kind = getattr(pytest.importorskip(package), name)
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]
        return kind(groups, lr=1e-2, **options)

    return make


QUANTIZED: dict[str, Callable[..., Optimizer]] = {
    "momentum": _quantized(__name__, "QuantizedMomentum"),
    "replaced momentum": partial(_quantized(__name__, "QuantizedMomentum"), replace=True),
    "torchao AdamW8bit": _quantized("torchao.optim", "AdamW8bit"),
    "torchao AdamW4bit": _quantized("torchao.optim", "AdamW4bit"),
    "torchao AdamWFp8": _quantized("torchao.optim", "AdamWFp8"),
    "bitsandbytes AdamW8bit": _quantized("bitsandbytes.optim", "AdamW8bit"),
}


class NeedsClosure(SGD):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Twisted(Optimizer):
    """Gradient descent that counts the steps of each parameter, with a twist in its updates.

    `twist` gets the optimizer, the group, a parameter and its state, and returns what is subtracted
    from the gradient. `shared` is what the optimizer keeps.
    """

    total = 0
    twist: Any = staticmethod(lambda o, g, p, s: None)

    def __init__(self, params: Iterable[torch.Tensor], twist: Any = None, **shared: Any) -> None:
        super().__init__(params, {"lr": 0.1, "noisy": False})
        if twist is not None:
            self.twist = twist
        vars(self).update(shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    # What ran ahead and is dropped must leave no trace in mutable states, either.
                    state.setdefault("history", []).append(state["step"])
                    state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    twisted = self.twist(self, group, p, state)
                    p.sub_(p.grad - (0.0 if twisted is None else twisted), alpha=group["lr"])


def twisted(twist: Any, **shared: Any) -> Callable[[Any], Optimizer]:
    return lambda params: Twisted(params, twist, **shared)


def noise(o: Any, g: Any, p: torch.Tensor, s: Any) -> torch.Tensor:
    """Random numbers of torch."""
    return 0.1 * torch.randn_like(p)


def coupled(o: Any, g: Any, p: torch.Tensor, s: Any) -> torch.Tensor:
    """A number that all gradients of the group have a part in."""
    return 0.1 * torch.stack([p.grad.sum() for p in g["params"] if p.grad is not None]).sum()


_seen: list[int] = []


def _count_in_default(*_: Any, counts: list[int] = []) -> None:  # noqa: B006
    counts.append(1)


def _count_in_class(optimizer: Any, *_: Any) -> None:
    type(optimizer).total += 1


def _counter() -> Callable[..., None]:
    count: list[int] = []
    return lambda *_: count.append(1)


def _with_method(twist: Callable[..., Any]) -> Any:
    """A class whose twist is a method, as those of other packages are."""
    return type("CountsOutside", (Twisted,), {"twist": twist, "__module__": __name__})


class NeedsGradMode(SGD):
    """Differentiates in its step, without switching that on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        for p in self.param_groups[0]["params"]:
            copy = p.detach().requires_grad_()
            (change,) = torch.autograd.grad((copy.square() * p.grad).sum(), [copy])
            p.data.sub_(change, alpha=0.01)


class CallsItsClosureTwice(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        super().step(closure)


class UsesTheLoss(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01 * float(0.5 if loss is None else loss))


def _when(found: Callable[[torch.Tensor, int], bool], twist: Any) -> Any:
    """The twist for parameters and steps of which `found` is true."""
    return lambda o, g, p, s: twist(o, g, p, s) if found(p, s["step"]) else None


_own_noise: Any = lambda o, g, p, s: 0.1 * torch.randn(p.shape, generator=o.generator)  # noqa: E731


#: Their updates depend on something that is different when others are there.
_COUPLED: dict[str, Callable[[Any], Optimizer]] = {
    "couples matrices": twisted(_when(lambda p, n: p.dim() == 2 and min(p.shape) > 16, coupled)),
    "couples from step 30 on": twisted(_when(lambda p, n: n >= 30, coupled)),
    "draws from NumPy": twisted(lambda o, g, p, s: 0.1 * float(np.random.randn())),
    "skips what is frozen": twisted(  # as copies are, which do not require a gradient
        lambda o, g, p, s: 0.0 if p.requires_grad else p.grad
    ),
    "uses the loss": UsesTheLoss,
    "has one rate for all groups": lambda params: Twisted(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.01}],  # type: ignore[list-item]
        lambda o, g, p, s: p.grad * (1 - o.param_groups[0]["lr"] / g["lr"]),
    ),
}

#: They keep something for all parameters together, by its name.
_KEEPING: dict[str, Callable[[Any], Optimizer]] = {
    "steps": twisted(lambda o, g, p, s: g.setdefault("steps", []).append(1)),
    "norms": twisted(lambda o, g, p, s: o.norms.append(1), norms=[]),
    "sums": twisted(lambda o, g, p, s: o.sums.add_(1) * 0, sums=torch.zeros(1)),
    "generator": lambda params: Twisted(params, _own_noise, generator=torch.Generator()),
    "state": twisted(lambda o, g, p, s: o.state["all"].setdefault("seen", []).append(1)),
    "_seen": _with_method(lambda *_: _seen.append(1)),  # of its module
    "_count_in_default": _with_method(_count_in_default),
    "total": _with_method(_count_in_class),
    "count": _with_method(_counter()),  # of its closure
}

#: How to make it, and the reason in the error message.
UNSUPPORTED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    **{name: (make, "when others are there") for name, make in _COUPLED.items()},
    **{
        f"keeps {name}": (make, rf"for all parameters together, outside of their states \({name}\)")
        for name, make in _KEEPING.items()
    },
    "keeps a state and its view": (
        twisted(lambda o, g, p, s: s.setdefault("view", s["sum"].view(-1)).mul_(0.9).view(p.shape)),
        "states of one parameter that share memory",
    ),
    "fails": (twisted(lambda *_: 1 / 0), "failed on two small tensors: ZeroDivisionError"),
    "has sparse gradients only": (SparseAdam, "failed on two small"),
    "needs grad mode": (NeedsGradMode, "failed on two small"),
    "needs a closure": (NeedsClosure, "needs a closure"),
    "calls its closure twice": (CallsItsClosureTwice, "does not call its closure once"),
    "draws from step 3 on": (twisted(_when(lambda p, n: n >= 3, noise)), "draws random numbers"),
    "wraps another": (
        lambda params: Twisted(params, base=SGD(params, 0.1)),
        r"wraps another optimizer \(base\); attach that one",
    ),
    "reads other parameters": (
        lambda params: Twisted(params, lambda o, *_: o.everything[0].mean(), everything=params),
        r"outside of its groups as well \(everything\)",
    ),
    "keeps the model": (
        lambda params: Twisted(params, model=nn.ParameterList(params)),
        r"outside of its groups as well \(model\)",
    ),
    "is differentiable": (
        lambda params: SGD(params, 0.1, differentiable=True),
        "made with differentiable=True",
    ),
}
