"""Precisions: of what states are computed in, and of what they are kept in.

[Note: stochastic rounding]
Rounding to the nearest loses every change that is smaller than half a step of the narrow type: with
bfloat16, an average that changes by less than one part in 256 stands still. Rounding up with a
probability as large as what is cut off keeps the average right in the mean. The random numbers come
from a generator of our own, seeded by subgroup and update: PyTorch's own are as without offload,
and an update that is run again rounds in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

#: Bits of float32 that bfloat16 does not have.
_CUT_OFF = 16
#: The state's name of a weight in float32; see [Note: master weights] in masters.py.
MASTER = "master_weight"
_NARROW = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class Precision:
    """What states are computed in, and what they are kept in between updates.

    Args:
        narrow: the dtype in which states of float32 are kept; None for their own.
        stochastic: whether rounding to it goes up or down by chance, instead of to the nearest.
        masters: whether weights of bfloat16 and float16 are updated in float32, in copies that are
            kept with their states.
    """

    narrow: torch.dtype | None = None
    stochastic: bool = False
    masters: bool = False

    def has_master(self, weight: torch.Tensor) -> bool:
        """Whether a weight is updated in a copy of float32."""
        return self.masters and weight.dtype in _NARROW

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype weights of a dtype, their gradients and their states are computed."""
        return torch.float32 if self.masters and dtype in _NARROW else dtype

    def kept(self, dtype: torch.dtype, name: str = "") -> torch.dtype:
        """In which dtype a state is kept.

        Args:
            dtype: that it is computed in.
            name: of the state; a master weight loses nothing.
        """
        if self.narrow is None or dtype != torch.float32 or name == MASTER:
            return dtype
        return self.narrow

    def master_bytes(self, weight: torch.Tensor) -> int:
        """Bytes of the copy in float32, if there is one."""
        return prod(weight.shape) * torch.float32.itemsize if self.has_master(weight) else 0


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
