"""Pieces: what of a parameter is updated at once; all of it, or some of its rows.

[Note: where a parameter may be cut]
Vector instructions and the plain loop that finishes what is left after them round differently, and
so do kernels that hand their threads blocks of 64 elements. A cut changes no bits if it lies where
the whole tensor's update would begin a block as well: at multiples of 64 elements. Whether that is
enough is tried out on the user's optimizer (`trial.can_be_cut`); one whose update of an element
depends on other elements is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.states.dtensor_shards import is_sharded, local_part

#: Cuts lie at multiples of so many elements; see [Note: where a parameter may be cut].
CUT_ELEMENTS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A parameter, or rows of it (of its first dimension).

    Args:
        parameter: the whole parameter.
        rows: first row and the row behind the last; None for all of it.
    """

    parameter: torch.Tensor
    rows: tuple[int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same rows of a tensor with as many of them (a view of a dense one)."""
        tensor = local_part(tensor)
        if self.rows is None:
            return tensor
        first, behind = self.rows
        return _sparse_rows(tensor, first, behind) if tensor.is_sparse else tensor[first:behind]

    @property
    def values(self) -> torch.Tensor:
        """The parameter itself, or a view of its rows, or of what is here, that is a leaf too."""
        whole = self.parameter
        if self.rows is None and not is_sharded(whole):
            return whole
        return self.of(local_part(whole).detach())

    @property
    def form(self) -> torch.Tensor:
        """A tensor on the meta device with the shape, strides and dtype of `values`."""
        whole = local_part(self.parameter)
        return self.of(
            torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="meta")
        )

    @property
    def numel(self) -> int:
        """Elements of it."""
        whole = local_part(self.parameter)
        if self.rows is None:
            return whole.numel()
        first, behind = self.rows
        return whole.numel() // whole.size(0) * (behind - first)

    def cut(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of a whole parameter's state is this piece's."""
        state = {name: self._here(value) for name, value in state.items()}
        if self.rows is None:
            return state
        return {name: self._cut(value) for name, value in state.items()}

    def _here(self, value: Any) -> Any:
        """What of a state is on this rank."""
        if not isinstance(value, torch.Tensor) or not is_sharded(self.parameter):
            return value
        whole, local = self.parameter.shape, local_part(self.parameter).shape
        if not is_sharded(value) and value.shape == whole != local:
            raise OffloadError(
                f"the state of a parameter of shape {tuple(whole)}, of which this rank has "
                f"{tuple(local)}, was given as a whole tensor. Load it with torch.distributed."
                f"checkpoint.state_dict.set_optimizer_state_dict(..., options=StateDictOptions("
                f"full_state_dict=True)), which gives every rank its part."
            )
        return local_part(value)

    def _cut(self, value: Any) -> Any:
        shape = local_part(self.parameter).shape
        whole = isinstance(value, torch.Tensor) and value.shape == shape
        if isinstance(value, torch.Tensor):
            # A copy of small ones: every piece counts its own steps.
            return self.of(value) if whole else value.clone()
        return value


def cut_into_pieces(parameter: torch.Tensor, limit: int) -> list[Piece]:
    """Cut a parameter into pieces of about equal size, of `limit` elements at most.

    Where rows are longer than that a piece is as small as cuts allow. What is not contiguous, and
    what has no rows, stays whole.

    Args:
        parameter: of any shape.
        limit: elements a piece.
    """
    local = local_part(parameter)
    total = local.numel()
    if total <= limit or local.dim() == 0 or not local.is_contiguous():
        return [Piece(parameter)]
    rows = local.size(0)
    per_row = total // rows
    unit = CUT_ELEMENTS // gcd(CUT_ELEMENTS, per_row)  # rows between two places for a cut
    units = -(-rows // unit)
    count = min(units, -(-total // max(limit, unit * per_row)))
    cuts = [min(rows, unit * (units * number // count)) for number in range(count)] + [rows]
    if count == 1:
        return [Piece(parameter)]
    return [Piece(parameter, (a, b)) for a, b in pairwise(cuts)]


def joined(pieces: Sequence[Piece], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a whole parameter, of the states of all of its pieces in order."""
    if pieces[0].rows is None:
        return states[0]
    state = {}
    for name, first in states[0].items():
        cut = isinstance(first, torch.Tensor) and first.shape == pieces[0].form.shape
        state[name] = torch.cat([each[name] for each in states]) if cut else first
    return state


def by_parameter(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces of the same parameter together, in the order of their rows."""
    together: dict[int, list[Piece]] = {}
    for piece in pieces:
        together.setdefault(id(piece.parameter), []).append(piece)
    for group in together.values():
        yield sorted(group, key=lambda piece: piece.rows or (0, 0))


def _sparse_rows(tensor: torch.Tensor, first: int, behind: int) -> torch.Tensor:
    """Rows of a sparse gradient, what was given for each still in the same order."""
    indices = tensor._indices()
    chosen = (indices[0] >= first) & (indices[0] < behind)
    moved = indices[:, chosen]
    moved[0] -= first
    size = (behind - first, *tensor.shape[1:])
    return torch.sparse_coo_tensor(
        moved, tensor._values()[chosen], size, is_coalesced=tensor.is_coalesced()
    )
