"""Which weights went into an update that ran ahead of `step()`, and whether they are still there.

[Note: what version counters do not see]
Weights may be changed between backward and `step()` without their version counters moving:
`p.data.clamp_(...)`, NumPy, fused optimizers of others. So besides the version, the sum of the very
bits is compared: integers that wrap around, which any clipping, scaling or overwriting changes. It
runs at memory speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_strategy.optimizer.states.flat_layout import packable

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightsMark:
    """Remembers what is in a few dense tensors.

    Args:
        weights: parameters, or views of their rows.
    """

    __slots__ = ("_bits", "_versions")

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._versions = [weight._version for weight in weights]
        self._bits = _sums_of_bits(weights)

    def has_versions_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether nothing that PyTorch knows of has changed these, the same ones taken anew."""
        return self._versions == [weight._version for weight in weights]

    def has_bits_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether there is the same in these, the same ones taken anew."""
        return all(map(packable, weights)) and torch.equal(self._bits, _sums_of_bits(weights))


@torch.no_grad()
def _sums_of_bits(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([_sum_of_words(_flat(weight)) for weight in weights])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory; the tensor is dense."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _sum_of_words(flat: torch.Tensor) -> torch.Tensor:
    """The sum of its bits as integers of eight bytes, and the rest at both ends."""
    itemsize = flat.element_size()
    if itemsize >= 8:
        return flat.view(torch.int64).sum()
    per_word = 8 // itemsize
    begin = min(flat.numel(), -flat.storage_offset() % per_word)
    end = begin + (flat.numel() - begin) // per_word * per_word
    total = flat[begin:end].view(torch.int64).sum()
    for rest in (flat[:begin], flat[end:]):
        if rest.numel():
            total = total + rest.view(_INTEGERS[itemsize]).sum()
    return total
