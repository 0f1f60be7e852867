"""What went into an update that ran ahead of `step()`, and whether it is still what is there.

[Note: what version counters do not see]
Gradients may be changed between backward and `step()` without their version counters moving:
GradScaler's kernel that unscales does not move them, nor do `p.grad.data.mul_(...)`, NumPy, and
kernels of other libraries. So besides identity and version, sums over the very bits are compared:
integers that wrap around, which any scaling, clipping or overwriting changes, and, since a change
of all signs can leave those as they are, the sum of the values. Both run at memory speed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from offload_strategy.optimizer.layout import packable

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_be_marked(parameter: torch.Tensor) -> bool:
    """Whether parameter and gradient are plain dense tensors, whose bits can be summed."""
    return packable(parameter) and packable(parameter.grad)


class InputsMark:
    """Remembers the weights and gradients of a few parameters; each must be `can_be_marked`."""

    __slots__ = ("_bits", "_gradients", "_versions")

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        self._gradients = [weakref.ref(grad) for grad in gradients if grad is not None]
        self._versions = _versions(parameters)
        self._bits = _sums_of_bits(parameters)

    def holds(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether no gradient and no weight of the same parameters was replaced or changed."""
        gradients = [parameter.grad for parameter in parameters]
        return (
            len(gradients) == len(self._gradients)
            and all(
                reference() is grad
                for reference, grad in zip(self._gradients, gradients, strict=True)
            )
            and self._versions == _versions(parameters)
            and all(can_be_marked(parameter) for parameter in parameters)
            and torch.equal(self._bits, _sums_of_bits(parameters))
        )


def _versions(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [
        (parameter._version, -1 if parameter.grad is None else parameter.grad._version)
        for parameter in parameters
    ]


@torch.no_grad()
def _sums_of_bits(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = _flat(parameter.grad)
        sums += [_sum_of_words(_flat(parameter)), _sum_of_words(gradient), _sum(gradient)]
    return torch.stack(sums)


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


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """The bits of the sum of its values."""
    values = torch.view_as_real(flat) if flat.is_complex() else flat
    total = values.sum()
    return total.view(_INTEGERS[total.element_size()]).to(torch.int64)
