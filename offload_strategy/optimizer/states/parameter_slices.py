"""What of a parameter is updated at once: the local shard of a DTensor, or a slice of its rows.

An elementwise update of a whole DTensor is the same update of every shard, so subgroups, kernels
and tiers only see local tensors. Users see DTensors, as plain optimizers make them.

[Note: where a parameter may be sliced]
Vector instructions and the scalar loop that handles the remainder round differently, and some
kernels hand blocks of 64 elements to their threads. A slice changes no bits if it begins where the
whole tensor's update would begin a block as well: at multiples of 64 elements. Whether that is
enough is checked on the user's optimizer (`trial.is_elementwise`); an optimizer whose
update of an element depends on other elements is never sliced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.torch_support.dtensors import is_sharded, local_tensor

#: Slices begin at multiples of so many elements; see [Note: where a parameter may be sliced].
SLICE_ALIGNMENT = 64


@dataclass(frozen=True, eq=False, slots=True)
class ParameterSlice:
    """A parameter, or rows of its local tensor: the first, and the one after the last."""

    parameter: torch.Tensor
    rows: tuple[int, int] | None = None
    #: That of the local tensor at first: users may give it another one by `parameter.data`.
    shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", local_tensor(self.parameter).shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same rows of a dense tensor with as many rows, as a view."""
        tensor = local_tensor(tensor)
        if self.rows is None:
            return tensor
        return tensor[slice(*self.rows)]

    @property
    def values(self) -> torch.Tensor:
        """The parameter itself, or a view of its local rows; a leaf in either case."""
        if self.rows is None and not is_sharded(self.parameter):
            return self.parameter
        return self.of(local_tensor(self.parameter).detach())

    @property
    def numel(self) -> int:
        """Number of elements."""
        begin, end = self.rows or (0, 1)
        return self.shape.numel() if self.rows is None else self.shape[1:].numel() * (end - begin)

    def slice_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This slice's part of a whole parameter's state."""
        return {
            name: self._part_of(value) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }

    def _part_of(self, value: torch.Tensor) -> torch.Tensor:
        whole, local = self.parameter.shape, local_tensor(self.parameter).shape
        if is_sharded(self.parameter):
            if not is_sharded(value) and value.shape == whole != local:
                raise OffloadError(
                    f"the state of a parameter of shape {tuple(whole)}, of which this rank has "
                    f"{tuple(local)}, was given as a whole tensor. Load it with torch.distributed."
                    f"checkpoint.state_dict.set_optimizer_state_dict(..., options=StateDictOptions("
                    f"full_state_dict=True)), which gives every rank its part."
                )
            value = local_tensor(value)
        if self.rows is None:
            return value
        # Step counters are copied: every slice increments its own.
        return self.of(value) if value.shape == local else value.clone()


def may_be_sliced(parameter: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether its gradient and state are dense and have its shape, which users may have changed.

    The order of additions to sparse ones depends on all of their rows.
    """
    local = local_tensor(parameter)
    values = (parameter.grad, *state.values())
    tensors = [local_tensor(v) for v in values if isinstance(v, torch.Tensor) and v.dim() > 0]
    return all(each.shape == local.shape and not each.is_sparse for each in tensors)


def slice_parameter(parameter: torch.Tensor, limit: int) -> list[ParameterSlice]:
    """Slice a parameter into parts of about equal size, of `limit` elements at most.

    Where `limit` is smaller than what [Note: where a parameter may be sliced] allows, slices are
    as small as possible. Tensors that are not contiguous, or have no dimension, stay whole.
    """
    local = local_tensor(parameter)
    total = local.numel()
    if total <= limit or local.dim() == 0 or not local.is_contiguous():
        return [ParameterSlice(parameter)]
    rows = local.size(0)
    per_row = total // rows
    unit = SLICE_ALIGNMENT // gcd(SLICE_ALIGNMENT, per_row)  # rows between two possible cuts
    units = -(-rows // unit)
    count = min(units, -(-total // max(limit, unit * per_row)))
    if count == 1:
        return [ParameterSlice(parameter)]
    cuts = [min(rows, unit * (units * number // count)) for number in range(count)] + [rows]
    return [ParameterSlice(parameter, each) for each in pairwise(cuts)]


def in_batches(slices: Iterable[ParameterSlice], limit: int) -> Iterator[list[ParameterSlice]]:
    """Gather slices in order, `limit` elements at most at a time; a larger slice is alone."""
    batch: list[ParameterSlice] = []
    elements = 0
    for each in slices:
        if batch and elements + each.numel > limit:
            yield batch
            batch, elements = [], 0
        batch.append(each)
        elements += each.numel
    if batch:
        yield batch
