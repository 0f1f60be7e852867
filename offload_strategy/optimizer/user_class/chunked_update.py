"""Updates of what is kept in a narrower precision than it is computed in.

[Note: a part at a time]
Widened all at once, the states of a subgroup take memory of their own, twice as much as they lie
in, which the kernel zeroes first, and go through the host's memory twice more. Widened a part at a
time, into the same memory each time, they stay in the processor's caches, and less goes through
memory than for states that are as wide as they are computed. So do gradients of narrow weights
that have a master. Parts are cut where pieces are: it changes no bits, see [Note: where a parameter
may be cut].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload_strategy.optimizer.states.flat_layout import packable
from offload_strategy.optimizer.states.parameter_slices import (
    CUT_ELEMENTS,
    Piece,
    cut_into_pieces,
    joined,
)
from offload_strategy.optimizer.states.precision import round_into
from offload_strategy.units import round_up

#: Elements that are updated at a time, which take 8 MiB for two states in float32: fewer cost more
#: in calls than they save in caches (a step took 5 % longer with a quarter of them).
PART_ELEMENTS = 1024 * 1024

_Batch = list[tuple[int, Piece]]
_States = Sequence[dict[str, Any]]


def can_go_by_parts(weights: Sequence[torch.Tensor], states: _States) -> bool:
    """Whether an update can be run a part at a time.

    Args:
        weights: with their gradients.
        states: of each, as they are kept.
    """
    return all(
        tensor is not None
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.shape == weight.shape
        for weight, state in zip(weights, states, strict=True)
        for tensor in (weight, weight.grad, *filter(packable, state.values()))
    )


def run_by_parts(
    run: Callable[[Sequence[torch.Tensor], _States], None],
    weights: Sequence[torch.Tensor],
    states: _States,
    narrow: Sequence[dict[str, torch.dtype]],
    borrow: Callable[[int], torch.Tensor],
    generator: torch.Generator | None,
) -> bool:
    """Update weights in place, and their states where they are kept.

    Args:
        run: updates some tensors and their states, as `kernel.run_update`.
        weights: leaf tensors whose `.grad` is set, for which `can_go_by_parts` holds.
        states: of each, as they are kept; changed in place.
        narrow: of each, what its narrow states are computed in, by name.
        borrow: lends a flat uint8 tensor of so many bytes.
        generator: for stochastic rounding; None to round to the nearest.

    Returns:
        Whether the optimizer has made states that were not there.
    """
    batches = list(_batches(weights))
    known = [len(state) for state in states]
    most = max(_scratch_bytes(batch, narrow) for batch in batches)
    scratch = borrow(most) if most else torch.empty(0, dtype=torch.uint8)
    after: list[list[tuple[Piece, dict[str, Any]]]] = [[] for _ in weights]
    for batch in batches:
        for (index, piece), state in zip(
            batch, _run_batch(run, batch, weights, states, narrow, scratch, generator), strict=True
        ):
            after[index].append((piece, state))
    for index, parts in enumerate(after):
        _take_over(states[index], parts)
    return known != [len(state) for state in states]


def _batches(weights: Sequence[torch.Tensor]) -> Iterator[_Batch]:
    """What to update at a time: small weights together, large ones in several parts."""
    batch: _Batch = []
    elements = 0
    for index, weight in enumerate(weights):
        for piece in cut_into_pieces(weight, PART_ELEMENTS):
            if batch and elements + piece.numel > PART_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append((index, piece))
            elements += piece.numel
    if batch:
        yield batch


def _scratch_bytes(batch: _Batch, narrow: Sequence[dict[str, torch.dtype]]) -> int:
    return sum(
        round_up(piece.numel, CUT_ELEMENTS) * dtype.itemsize
        for index, piece in batch
        for dtype in narrow[index].values()
    )


def _run_batch(
    run: Callable[[Sequence[torch.Tensor], _States], None],
    batch: _Batch,
    weights: Sequence[torch.Tensor],
    states: _States,
    narrow: Sequence[dict[str, torch.dtype]],
    scratch: torch.Tensor,
    generator: torch.Generator | None,
) -> list[dict[str, Any]]:
    """Update some parts; returns their states without those that are narrow."""
    parts, wide = [], []
    begin = 0
    for index, piece in batch:
        part, gradient = piece.values, weights[index].grad
        if piece.rows is not None:
            assert gradient is not None
            part.grad = piece.of(gradient)
        state = piece.cut(states[index])
        for name, dtype in narrow[index].items():
            kept = state[name]
            end = begin + kept.numel() * dtype.itemsize
            state[name] = scratch[begin:end].view(dtype).view(kept.shape).copy_(kept)
            begin = round_up(end, CUT_ELEMENTS * dtype.itemsize)
        parts.append(part)
        wide.append(state)
    run(parts, wide)
    for (index, piece), state in zip(batch, wide, strict=True):
        for name in narrow[index]:
            value = state.pop(name, None)
            if value is not None:
                round_into(piece.of(states[index][name]), value, generator)
    return wide


def _take_over(state: dict[str, Any], parts: Sequence[tuple[Piece, dict[str, Any]]]) -> None:
    """Take over what of a weight's state is not narrow, from the states of its parts."""
    pieces, found = [piece for piece, _ in parts], [after for _, after in parts]
    for name in found[-1]:
        kept = state.get(name)
        if kept is None or not packable(kept):
            state[name] = joined(pieces, [{name: each[name]} for each in found])[name]
            continue
        for piece, each in parts:
            place = piece.of(kept)
            if place.data_ptr() != each[name].data_ptr():
                place.copy_(each[name])
