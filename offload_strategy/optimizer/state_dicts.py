"""States by parameter, as everybody outside sees them, of states that are kept by subgroup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_strategy.checkpoints import ScratchFile, Slot
from offload_strategy.optimizer.states.dtensor_shards import like_parameter, local_part
from offload_strategy.optimizer.states.flat_layout import packable
from offload_strategy.optimizer.states.parameter_slices import Piece, joined
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Outline, Updater

State = dict[str, Any]


class Sealed:
    """A tensor of a state dict, not looked into by whoever hands it on.

    `Optimizer.load_state_dict` would bring every tensor into the dtype and to the device of its
    parameter, all at once; in the dtype of a narrow weight its master would lose what it is for.

    Args:
        tensor: of a parameter's state.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def sealed(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states of a state dict, with all tensors sealed that go to a tier."""
    return {
        key: {name: _seal(name, value) for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for key, state in states.items()
    }


def unsealed(state: State) -> State:
    """The same state with its tensors."""
    return {
        name: value.tensor if isinstance(value, Sealed) else value for name, value in state.items()
    }


def _seal(name: str, value: Any) -> Any:
    # Step counters have rules of their own.
    return Sealed(value) if name != "step" and packable(value) else value


def state_of(
    parameter: torch.Tensor, subgroups: Sequence[Subgroup], updater: Updater
) -> State | None:
    """A copy of a parameter's state in ordinary memory; None if it is in none of the subgroups."""
    pieces: list[tuple[Piece, State]] = []
    for subgroup, indices in _homes(parameter, subgroups):
        copies = updater.copies(subgroup)
        pieces += [(subgroup.pieces[index], copies[index]) for index in indices]
    if not pieces:
        return None
    pieces.sort(key=lambda entry: entry[0].rows or (0, 0))
    state = joined([piece for piece, _ in pieces], [state for _, state in pieces])
    return {name: like_parameter(value, parameter) for name, value in state.items()}


def replace_state(
    parameter: torch.Tensor, state: State, subgroups: Sequence[Subgroup], updater: Updater
) -> bool:
    """Give a parameter another state; False if it is in none of the subgroups."""
    found = False
    for subgroup, indices in _homes(parameter, subgroups):
        states = updater.copies(subgroup)
        for index in indices:
            states[index] = subgroup.pieces[index].cut(state)
        updater.absorb(subgroup, states)
        found = True
    return found


def absorb_states(
    states: Mapping[torch.Tensor, State], subgroups: Sequence[Subgroup], updater: Updater
) -> None:
    """Replace the states of all parameters, subgroup by subgroup."""
    for subgroup in subgroups:
        cut = []
        for piece in subgroup.pieces:
            given = states.get(piece.parameter, {})
            own = piece.cut(unsealed(given))
            for name, value in given.items():
                if isinstance(value, Sealed):
                    own[name] = _as_loaded(own[name], piece.parameter, updater.precision)
                elif isinstance(own[name], torch.Tensor) and not packable(own[name]):
                    own[name] = own[name].clone()  # not a part of some file that is mapped
            cut.append(own)
        updater.absorb(subgroup, cut)


def _as_loaded(value: torch.Tensor, parameter: torch.Tensor, precision: Precision) -> torch.Tensor:
    """A tensor of a state dict, as `Optimizer.load_state_dict` makes it a parameter's."""
    dtype = precision.computed(parameter.dtype) if parameter.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype)


class StateReader(Protocol):
    """Reads the states of subgroups."""

    def outline(self, subgroup: Subgroup) -> Outline:
        """What states a subgroup has, without the values of large ones."""

    def values(self, subgroup: Subgroup, outline: Outline) -> Iterator[torch.Tensor]:
        """The values of what is stored, one after the other; not to be changed or kept."""


def streamed_states(
    subgroups: Sequence[Subgroup], reader: StateReader, directories: Sequence[Path]
) -> dict[torch.Tensor, State]:
    """The states of all parameters, of which large tensors lie in an unlinked file.

    One subgroup's states are in memory at a time. The tensors are ordinary ones over private maps
    of the file, which is gone with the last of them.

    Args:
        subgroups: all of them.
        reader: reads their states.
        directories: where the file may lie; none for ordinary memory.

    Raises:
        TierFullError: no directory has room.
        StorageError: states could not be read, or the file not be written.
    """
    found: dict[torch.Tensor, State] = {}
    outlines = [reader.outline(subgroup) for subgroup in subgroups]
    with ScratchFile(directories) as scratch:
        slots: dict[torch.Tensor, dict[str, Slot]] = {}
        for subgroup, outline in zip(subgroups, outlines, strict=True):
            for piece, small in zip(subgroup.pieces, outline.small, strict=True):
                found.setdefault(piece.parameter, small)
            for index, name, segment, dtype in outline.stored:
                piece = subgroup.pieces[index]
                own = slots.setdefault(piece.parameter, {})
                if name not in own:
                    shape = local_part(piece.parameter).shape
                    whole = segment.shape if piece.rows is None else shape
                    strides = segment.strides if piece.rows is None else None
                    own[name] = scratch.reserve(whole, dtype, strides)
        for subgroup, outline in zip(subgroups, outlines, strict=True):
            read = reader.values(subgroup, outline)
            for (index, name, _, _), values in zip(outline.stored, read, strict=True):
                piece = subgroup.pieces[index]
                start = 0 if piece.rows is None else piece.rows[0]
                slots[piece.parameter][name].fill(start, values)
        for parameter, own in slots.items():
            found[parameter].update(
                (name, like_parameter(slot.tensor(), parameter)) for name, slot in own.items()
            )
    return found


def _homes(
    parameter: torch.Tensor, subgroups: Sequence[Subgroup]
) -> Iterator[tuple[Subgroup, list[int]]]:
    for subgroup in subgroups:
        indices = [i for i, piece in enumerate(subgroup.pieces) if piece.parameter is parameter]
        if indices:
            yield subgroup, indices
