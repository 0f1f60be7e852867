"""Master weights: weights of narrow dtypes are updated in float32.

[Note: master weights]
An update that is smaller than half a step of bfloat16 or float16 is lost when it is added to the
weight itself, and most updates are (Mixed Precision Training, Micikevicius et al. 2018, section
3.1). So a copy in float32 is kept among the states of the weight, under `precision.MASTER`; the
user's class updates that one, with the gradient in float32, and what comes out is rounded to the
nearest into the weight. Where somebody else has changed the weight since (a loaded model, a clamp),
the weight counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload_strategy.optimizer.states.precision import MASTER, Precision


@contextmanager
def masters_of(
    weights: Sequence[torch.Tensor], states: Sequence[dict[str, Any]], precision: Precision
) -> Iterator[list[torch.Tensor]]:
    """What to update in place of weights; when it is updated, they are too.

    Args:
        weights: leaf tensors whose `.grad` is set; those of narrow dtypes are written in the end.
        states: of each; masters are taken out for the update, and are among them after it.
        precision: says which weights have masters.

    Yields:
        masters with gradients in float32, and the other weights as they are.
    """
    updated = [
        _master(weight, state) if precision.has_master(weight) else weight
        for weight, state in zip(weights, states, strict=True)
    ]
    own = [
        (weight, state, master)
        for weight, state, master in zip(weights, states, updated, strict=True)
        if master is not weight
    ]
    try:
        yield updated
    finally:  # an update that fails loses nothing
        for _, state, master in own:
            master.grad = None
            state[MASTER] = master
    for weight, _, master in own:
        weight.detach().copy_(master)


def _master(weight: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """A weight's master with its gradient, taken out of its state; made where there is none."""
    weight, gradient = weight.detach(), weight.grad
    master: torch.Tensor | None = state.pop(MASTER, None)
    if master is None:
        master = weight.float()
    else:
        same = master.to(weight.dtype) == weight
        if not bool(same.all()):
            master.copy_(torch.where(same, master, weight.float()))
    assert gradient is not None
    master.grad = gradient.float()
    return master
