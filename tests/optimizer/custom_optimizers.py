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
