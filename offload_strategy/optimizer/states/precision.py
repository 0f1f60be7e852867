"""Keeping states in less precision than they are computed in.

[Note: stochastic rounding]
Rounding to the nearest loses every change that is smaller than half a step of the narrow type: with
bfloat16, an average that changes by less than one part in 256 stands still. Rounding up with a
probability as large as what is cut off keeps the average right in the mean. The random numbers come
from a generator of our own, seeded by subgroup and update: PyTorch's own are as without offload,
and an update that is run again rounds in the same way.
"""

from __future__ import annotations

import torch

#: Bits of float32 that bfloat16 does not have.
_CUT_OFF = 16


def kept_dtype(dtype: torch.dtype, narrow: torch.dtype | None) -> torch.dtype:
    """In which dtype a state is kept: `narrow` stands in for float32."""
    return narrow if narrow is not None and dtype == torch.float32 else dtype


def round_into(
    kept: torch.Tensor, computed: torch.Tensor, generator: torch.Generator | None
) -> None:
    """Write a state into the precision in which it is kept.

    Args:
        kept: is written; of any dtype.
        computed: has the values; of the same shape and strides.
        generator: for stochastic rounding from float32 to bfloat16; None for the nearest, and for
            all other dtypes.
    """
    if generator is None or (computed.dtype, kept.dtype) != (torch.float32, torch.bfloat16):
        kept.copy_(computed)
        return
    bits = computed.view(torch.int32)
    noise = torch.randint_like(bits, 1 << _CUT_OFF, generator=generator)
    # Carries over into what is kept with the probability that is wanted. What is not finite has
    # no room above.
    cut = (bits + noise) >> _CUT_OFF << _CUT_OFF
    kept.copy_(torch.where(computed.isfinite(), cut.view(torch.float32), computed))


def seed(generator: torch.Generator, subgroup: int, update: int) -> None:
    """Make a generator ready for one update of one subgroup."""
    generator.manual_seed(subgroup << 32 | update)
