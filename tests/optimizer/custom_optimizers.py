"""Optimizers outside of torch: one that is supported, and one for each reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, Optimizer


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
                state = self.state[p]
                if not state:
                    state.update(momentum=torch.zeros_like(p), history=[])
                momentum = state["momentum"]
                p.add_(momentum.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - second)
                # What ran ahead and is dropped must leave no trace in mutable states, either.
                state["history"].append(float(momentum.sum()))


class _Descent(Optimizer):
    """Plain gradient descent, with a way to spoil it."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1, "seen": []})
        self.count = 0
        self.norms: list[float] = []
        self.total = torch.zeros(1)

    def spoil(self, group: dict[str, Any]) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = self.spoil(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * factor)


class GlobalNorm(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        return 1.0 / float(torch.stack(norms).norm())


class CountsInGroup(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return 1.0 / float(group["step"])


class CountsInItself(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        self.count += 1
        return 1.0 / self.count


class NotesInAList(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        self.norms.append(1.0)
        return 1.0


class NotesInTheGroup(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        group["seen"].append(1.0)
        return 1.0


class SumsInATensor(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        self.total.add_(1)
        return 1.0


class Noisy(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        return float(torch.rand(()))


class Failing(_Descent):
    def spoil(self, group: dict[str, Any]) -> float:
        raise ValueError("needs a GPU")


class NeedsClosure(_Descent):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()
        super().step()


class Wrapping(_Descent):
    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        params = list(params)
        super().__init__(params)
        self.base = SGD(params, 0.1)


#: Each with the reason in the error message.
UNSUPPORTED: dict[type[Optimizer], str] = {
    GlobalNorm: "updates a parameter in another way when others are there",
    CountsInGroup: r"for all parameters together, outside of their states \(step\)",
    CountsInItself: r"for all parameters together, outside of their states \(count\)",
    NotesInAList: r"for all parameters together, outside of their states \(norms\)",
    NotesInTheGroup: r"for all parameters together, outside of their states \(seen\)",
    SumsInATensor: r"for all parameters together, outside of their states \(total\)",
    Noisy: "draws random numbers",
    Failing: "failed on two small tensors: ValueError: needs a GPU",
    NeedsClosure: "needs a closure",
    Wrapping: r"wraps another optimizer \(base\); attach that one",
}
