"""Optimizers outside of torch: one that is supported, and one for each reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer, SparseAdam


class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), with a state for each parameter."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p] = {"momentum": torch.zeros_like(p), "history": []}
                state = self.state[p]
                momentum = state["momentum"]
                p.add_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)
                # What ran ahead and is dropped must leave no trace in mutable states, either.
                state["history"].append(float(momentum.sum()))


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


class Spoiled(Optimizer):
    """Plain gradient descent, with a factor that spoils it."""

    def __init__(
        self, params: Iterable[torch.Tensor], factor_of: Callable[[Any, Any], Any]
    ) -> None:
        super().__init__(params, {"lr": 0.1, "seen": []})
        self.factor_of = factor_of
        self.count = 0
        self.norms: list[float] = []
        self.total = torch.zeros(1)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = float(self.factor_of(self, group) or 1.0)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * factor)


class NeedsClosure(SGD):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Wrapping(SGD):
    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        params = list(params)
        super().__init__(params)
        self.base = SGD(params, 0.1)


def _count_in_group(optimizer: Any, group: dict[str, Any]) -> float:
    group["step"] = group.get("step", 0) + 1
    return 1.0 / float(group["step"])


def _count_in_optimizer(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.count += 1
    return 1.0 / float(optimizer.count)


def _spoiled(factor_of: Callable[[Any, Any], Any]) -> Callable[[Any], Optimizer]:
    return lambda params: Spoiled(params, factor_of)


#: How to make it, and the reason in the error message.
UNSUPPORTED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "scales by the norm of all gradients": (
        _spoiled(lambda o, g: 1.0 / torch.stack([p.grad.norm() for p in g["params"]]).norm()),
        "updates a parameter in another way when others are there",
    ),
    "counts in its group": (
        _spoiled(_count_in_group),
        r"for all parameters together, outside of their states \(step\)",
    ),
    "counts in itself": (_spoiled(_count_in_optimizer), r"outside of their states \(count\)"),
    "fills a list": (_spoiled(lambda o, g: o.norms.append(1.0)), r"their states \(norms\)"),
    "fills a list of its group": (
        _spoiled(lambda o, g: g["seen"].append(1.0)),
        r"outside of their states \(seen\)",
    ),
    "sums in a tensor": (_spoiled(lambda o, g: o.total.add_(1) * 0), r"their states \(total\)"),
    "draws random numbers": (_spoiled(lambda o, g: torch.rand(())), "draws random numbers"),
    "fails": (_spoiled(lambda o, g: 1 / 0), "failed on two small tensors: ZeroDivisionError"),
    "needs a closure": (NeedsClosure, "needs a closure"),
    "wraps another": (Wrapping, r"wraps another optimizer \(base\); attach that one"),
    "has sparse gradients only": (SparseAdam, "failed on two small"),
}
