"""Precision of optimizer states: compute dtype, stored dtype, stochastic rounding, master weights.

[Note: stochastic rounding]
Rounding to nearest loses changes smaller than half a step of the stored dtype. Rounding up with a
probability equal to the discarded fraction keeps the expected value. The random numbers come from
generators of our own, seeded by subgroup and update, so an update that is run again rounds alike.

[Note: master weights]
Most updates are smaller than half a step of bfloat16 or float16 (Mixed Precision Training,
Micikevicius et al. 2018, section 3.1). So a float32 copy is kept among the states of the weight,
under `MASTER_WEIGHT`. The user's class updates the copy, with the gradient in float32, and the
result is rounded to nearest into the weight. Where somebody else has changed the weight since (a
loaded model, a clamp), the weight counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

#: Mantissa bits of float32 that bfloat16 does not have.
_DISCARDED_BITS = 16
#: Name of the state that is a master weight; see [Note: master weights].
MASTER_WEIGHT = "master_weight"
#: Separates the name of a state from the name of a tensor inside it; see `flatten_wrappers`.
INNER = "\0"
_HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Precision:
    """In which dtypes states are computed, and stored between updates."""

    #: In which float32 states are stored; None for float32.
    state_dtype: torch.dtype | None = None
    #: Whether they are rounded stochastically, instead of to nearest.
    stochastic_rounding: bool = False
    #: Whether weights of bfloat16 and float16 are updated in float32 copies.
    master_weights: bool = False

    def has_master(self, weight: torch.Tensor) -> bool:
        """Whether a weight is updated in a float32 copy."""
        return self.compute_dtype(weight.dtype) != weight.dtype

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which weights of `dtype`, their gradients and their states are computed."""
        return torch.float32 if self.master_weights and dtype in _HALF_DTYPES else dtype

    def stored_dtype(self, dtype: torch.dtype, name: str = "") -> torch.dtype:
        """Dtype in which a state of this compute dtype and name is stored."""
        kept = dtype != torch.float32 or name == MASTER_WEIGHT or INNER in name
        return dtype if kept or self.state_dtype is None else self.state_dtype


def copy_rounded(
    stored: torch.Tensor, computed: torch.Tensor, generator: torch.Generator | None
) -> None:
    """Copy a computed state into its stored dtype, to nearest, or stochastically to bfloat16."""
    if generator is None or (computed.dtype, stored.dtype) != (torch.float32, torch.bfloat16):
        stored.copy_(computed)
        return
    bits = computed.view(torch.int32)
    noise = torch.randint_like(bits, 1 << _DISCARDED_BITS, generator=generator)
    # The addition carries into the kept bits with the desired probability. Infinities and NaNs
    # must not be carried into.
    rounded = (bits + noise) >> _DISCARDED_BITS << _DISCARDED_BITS
    stored.copy_(torch.where(computed.isfinite(), rounded.view(torch.float32), computed))


@contextmanager
def master_weights_of(
    weights: Sequence[torch.Tensor], states: Sequence[dict[str, Any]], precision: Precision
) -> Iterator[list[torch.Tensor]]:
    """Give master weights to be updated instead of their weights; copy them back at the end.

    Meanwhile they are not among the states. Weights without one are given as they are.
    """
    masters = {
        index: _master_weight(weight, state)
        for index, (weight, state) in enumerate(zip(weights, states, strict=True))
        if precision.has_master(weight)
    }
    try:
        yield [masters.get(index, weight) for index, weight in enumerate(weights)]
    finally:  # a failing update loses no state
        for index, master in masters.items():
            master.grad = None
            states[index][MASTER_WEIGHT] = master
    for index, master in masters.items():
        weights[index].detach().copy_(master)


def _master_weight(weight: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Take a weight's master weight with its gradient out of its state, or make one."""
    weight, gradient = weight.detach(), weight.grad
    master: torch.Tensor | None = state.pop(MASTER_WEIGHT, None)
    if master is None:
        master = weight.float()
    else:
        unchanged = master.to(weight.dtype) == weight
        if not weight.is_cpu or not bool(unchanged.all()):  # a device would have to be awaited
            master.copy_(torch.where(unchanged, master, weight.float()))
    assert gradient is not None
    master.grad = gradient.float()
    return master
