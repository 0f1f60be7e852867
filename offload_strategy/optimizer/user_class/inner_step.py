"""One update of a few tensors by the user's own optimizer class, with its own kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


def run_update(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[torch.Tensor],
    states: Sequence[dict[str, Any]],
) -> None:
    """Update tensors in place, as `optimizer.step()` would update its own.

    The class's own `step` runs on a shadow of the instance: same code path, same kernel (single,
    foreach or fused), same bits.

    Args:
        optimizer: the user's instance; it is not changed.
        group: the parameter group that the tensors belong to, for its hyper-parameters.
        parameters: leaf tensors whose `.grad` is set.
        states: the state of each; changed in place, and filled where empty.
    """
    unhooked_step(type(optimizer))(shadow_of(optimizer, group, parameters, states))


def shadow_of(
    optimizer: Optimizer,
    group: dict[str, Any],
    parameters: Sequence[torch.Tensor],
    states: Sequence[dict[str, Any]],
) -> Optimizer:
    """An instance of the same class with the same attributes, but only these tensors."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    shadow.param_groups = [{**group, "params": list(parameters)}]
    shadow.state = defaultdict(dict, zip(parameters, states, strict=True))
    return shadow


def unhooked_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's `step` without the hooks that `Optimizer` wraps around it (they run once)."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
