"""States by parameter, as users see them, of states that are stored by subgroup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_strategy.checkpoints import ScratchFile, ScratchTensor
from offload_strategy.optimizer.states.flat_layout import packable
from offload_strategy.optimizer.states.parameter_slices import (
    ParameterSlice,
    join_states,
    local_tensor,
    shard_like,
)
from offload_strategy.optimizer.states.subgroups import State, Subgroup
from offload_strategy.optimizer.subgroup_update import StateMetadata, Updater


class OpaqueTensor:
    """A tensor of a state dict that `Optimizer.load_state_dict` does not recognise as a tensor.

    It would move every tensor to the device of its parameter and cast it to the parameter's dtype,
    all of them at once; a master weight would lose its precision.

    Args:
        tensor: a dense state.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def wrap_tensors(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Wrap the dense tensors of a state dict's states; step counters have rules of their own."""
    return {
        key: {
            name: OpaqueTensor(value) if name != "step" and packable(value) else value
            for name, value in state.items()
        }
        if isinstance(state, dict)
        else state
        for key, state in states.items()
    }


def unwrap_tensors(state: State) -> State:
    """The same state with its tensors."""
    return {
        name: value.tensor if isinstance(value, OpaqueTensor) else value
        for name, value in state.items()
    }


def replace_all_states(
    states: Mapping[torch.Tensor, State], subgroups: Sequence[Subgroup], updater: Updater
) -> None:
    """Replace the states of all parameters, subgroup by subgroup; missing ones are cleared."""
    for subgroup in subgroups:
        slice_states = []
        for param_slice in subgroup.slices:
            parameter = param_slice.parameter
            given = states.get(parameter, {})
            own = param_slice.slice_state(unwrap_tensors(given))
            for name, value in given.items():
                if isinstance(value, OpaqueTensor):
                    # As `Optimizer.load_state_dict` casts it.
                    dtype = own[name].dtype
                    if parameter.is_floating_point():
                        dtype = updater.precision.compute_dtype(parameter.dtype)
                    own[name] = own[name].to(parameter.device, dtype)
                elif isinstance(own[name], torch.Tensor) and not packable(own[name]):
                    own[name] = own[name].clone()  # not a view of a memory-mapped file
            slice_states.append(own)
        updater.replace_states(subgroup, slice_states)


class StateReader(Protocol):
    """Reads the states of subgroups."""

    def metadata(self, subgroup: Subgroup) -> StateMetadata:
        """What states a subgroup has, without the values of stored tensors."""

    def values(self, subgroup: Subgroup, metadata: StateMetadata) -> Iterator[torch.Tensor]:
        """Yield the stored tensors of a subgroup in order, not to be changed or kept."""


def streamed_states(
    subgroups: Sequence[Subgroup], reader: StateReader, directories: Sequence[Path]
) -> dict[torch.Tensor, State]:
    """The states of all parameters, with large tensors in an unlinked file.

    The states of one subgroup are in memory at a time. The tensors are ordinary ones over private
    maps of the file, which is gone with the last of them.

    Args:
        subgroups: all of them.
        reader: reads their states.
        directories: where the file may be; none for ordinary memory.

    Raises:
        TierFullError: no directory has room.
        StorageError: states could not be read, or the file not be written.
    """
    states: dict[torch.Tensor, State] = {}
    all_metadata = [reader.metadata(subgroup) for subgroup in subgroups]
    with ScratchFile(directories) as scratch:
        slots: dict[torch.Tensor, dict[str, ScratchTensor]] = {}
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            for param_slice, small in zip(subgroup.slices, metadata.small, strict=True):
                states.setdefault(param_slice.parameter, small)
            for index, name, segment, dtype in metadata.stored:
                param_slice = subgroup.slices[index]
                own = slots.setdefault(param_slice.parameter, {})
                if name not in own and param_slice.rows is None:
                    own[name] = scratch.reserve(segment.shape, dtype, segment.strides)
                elif name not in own:
                    shape = local_tensor(param_slice.parameter).shape
                    own[name] = scratch.reserve(shape, dtype, None)
        for subgroup, metadata in zip(subgroups, all_metadata, strict=True):
            read = reader.values(subgroup, metadata)
            for (index, name, _, _), values in zip(metadata.stored, read, strict=True):
                param_slice = subgroup.slices[index]
                start = 0 if param_slice.rows is None else param_slice.rows[0]
                slots[param_slice.parameter][name].fill(start, values)
        for parameter, own in slots.items():
            states[parameter].update(
                (name, shard_like(slot.tensor(), parameter)) for name, slot in own.items()
            )
    return states


class SubgroupOwnership(Protocol):
    """Knows which subgroups this rank has the states of."""

    def own(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Those of this rank."""

    def check_local(self, parameter: torch.Tensor, subgroups: Sequence[Subgroup]) -> None:
        """Raise `OffloadError` if another rank has the state of a parameter."""


class StateView(MutableMapping[torch.Tensor, State]):
    """`optimizer.state`: parameter -> state dict, loaded when it is read.

    Reading gives copies: change a state by assigning the whole dict back
    (``optimizer.state[p] = {...}``) or through `load_state_dict`.

    Args:
        updater: loads and stores states.
        subgroups: returns the current subgroups.
        ownership: tells which of them this rank has.
    """

    def __init__(
        self,
        updater: Updater,
        subgroups: Callable[[], list[Subgroup]],
        ownership: SubgroupOwnership,
    ) -> None:
        self._updater = updater
        self._subgroups = subgroups
        self._ownership = ownership

    def __getitem__(self, parameter: torch.Tensor) -> State:
        subgroups = self._subgroups()
        self._ownership.check_local(parameter, subgroups)
        states: list[tuple[ParameterSlice, State]] = []
        for subgroup in self._ownership.own(subgroups):
            indices = _indices_of(parameter, subgroup)
            if indices:
                copies = self._updater.state_copies(subgroup)
                states += [(subgroup.slices[index], copies[index]) for index in indices]
        if not states:
            return {}  # like the defaultdict of a plain optimizer
        states.sort(key=lambda entry: entry[0].rows or (0, 0))
        state = join_states([each for each, _ in states], [state for _, state in states])
        return {name: shard_like(value, parameter) for name, value in state.items()}

    def __setitem__(self, parameter: torch.Tensor, state: State) -> None:
        subgroups = self._subgroups()
        if not any(_indices_of(parameter, subgroup) for subgroup in subgroups):
            raise KeyError("this parameter does not belong to the optimizer")
        for subgroup in self._ownership.own(subgroups):
            indices = _indices_of(parameter, subgroup)
            if indices:
                states = self._updater.state_copies(subgroup)
                for index in indices:
                    states[index] = subgroup.slices[index].slice_state(state)
                self._updater.replace_states(subgroup, states)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        subgroups = self._subgroups()
        own = self._ownership.own(subgroups)
        here = set(map(id, own))
        elsewhere = (subgroup for subgroup in subgroups if id(subgroup) not in here)
        seen = {id(each.parameter) for subgroup in elsewhere for each in subgroup.slices}
        for subgroup in own:
            stored = {index for index, _ in subgroup.states.names}
            for index, param_slice in enumerate(subgroup.slices):
                has_state = index in stored or subgroup.states.small[index]
                if has_state and id(param_slice.parameter) not in seen:
                    seen.add(id(param_slice.parameter))
                    yield param_slice.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is own for own in self)


def _indices_of(parameter: torch.Tensor, subgroup: Subgroup) -> list[int]:
    return [i for i, each in enumerate(subgroup.slices) if each.parameter is parameter]
