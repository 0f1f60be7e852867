"""States by parameter, as users see them, of states that are stored by subgroup."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.inner_guard import own_call
from offload_strategy.optimizer.ranks.rank_shards import RankShards
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import (
    OpaqueTensor,
    State,
    Subgroup,
    digest_of,
    flatten_wrappers,
    packable,
)
from offload_strategy.optimizer.subgroup_update import Updater


def load_wrapped(state_dict: dict[str, Any], optimizer: Optimizer, precision: Precision) -> None:
    """Load a state dict; meanwhile float32 tensors stand for weights that have master weights.

    The class casts states to the dtypes of its parameters.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    stand_ins = {
        weight: torch.empty((), dtype=torch.float32, device=weight.device).expand(weight.shape)
        for weight in chain(*groups)
        if precision.has_master(weight)
    }
    for group in optimizer.param_groups:
        group["params"] = [stand_ins.get(weight, weight) for weight in group["params"]]
    try:
        with own_call(optimizer):
            optimizer.load_state_dict(_wrapped(state_dict, optimizer))
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for weight, stand_in in stand_ins.items():
            if stand_in in optimizer.state:
                optimizer.state[weight] = optimizer.state.pop(stand_in)


def _wrapped(state_dict: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A state dict with dense tensors wrapped, unless code outside of torch would see them.

    The class itself reads step counters, and other states without dimensions.
    """
    states = state_dict.get("state")
    loading = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    if (
        not isinstance(states, Mapping)
        or any(not method.__module__.startswith("torch.optim.") for method in loading)
        or len(optimizer._optimizer_load_state_dict_pre_hooks) > 1  # one of them is the guard's
        or optimizer._optimizer_load_state_dict_post_hooks
    ):
        return state_dict
    wrapped = {
        key: {
            name: OpaqueTensor(value) if name != "step" and packable(value) else value
            for name, value in state.items()
        }
        if isinstance(state, dict)
        else state
        for key, state in states.items()
    }
    return {**state_dict, "state": wrapped}


class _ReadState:
    """A copy of a state that somebody has read, and may change."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._seen = self._bits()

    def _bits(self) -> list[Any]:
        leaves, form = tree_flatten(flatten_wrappers(self.state))
        found: list[Any] = [form]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):  # versions do not tell of changes by NumPy
                found.append((leaf.dtype, leaf.shape, digest_of(leaf)))
            else:  # an array's text leaves values out, and digits
                found.append((repr(leaf), getattr(leaf, "tobytes", bytes)()))
        return found

    def take_changes(self) -> bool:
        """Whether it was changed since this was asked last, or since it was read."""
        seen, self._seen = self._seen, self._bits()
        return seen != self._seen

    def is_held(self) -> bool:
        """Whether anybody else has it, or the memory of one of its tensors."""
        return any(map(operator.gt, self._references(), _WITHOUT_HOLDERS))

    def _references(self) -> list[int]:
        """The most references that the dictionary, a tensor, an inner one and a storage have."""
        whole = [leaf for leaf in tree_leaves(self.state) if isinstance(leaf, torch.Tensor)]
        plain = [value for value in flatten_wrappers(self.state).values() if packable(value)]
        storages = [value.untyped_storage()._cdata for value in plain]
        return [
            sys.getrefcount(self.state),
            max(map(sys.getrefcount, whole), default=0),
            max(map(sys.getrefcount, plain), default=0),
            max(map(torch._C._storage_Use_Count, storages), default=0),
        ]


_WITHOUT_HOLDERS = _ReadState({"": torch.empty(1)})._references()


class StateView(MutableMapping[torch.Tensor, State]):
    """`optimizer.state`: parameter -> state dict, loaded when it is read.

    What is read is a copy. Changes of it are written back before the next backward, step or state
    dict, or when nobody holds the copy any more; a change after a step was made is an error.
    """

    def __init__(
        self,
        inner: Optimizer,
        updater: Updater,
        subgroups: Callable[..., list[Subgroup]],
        rank_shards: RankShards,
        replaced: Callable[[], None],
    ) -> None:
        self._inner = inner  # which has the states of parameters that are in no group
        self._updater = updater
        self._subgroups = subgroups
        self._rank_shards = rank_shards
        self._replaced = replaced
        self._read: dict[torch.Tensor, _ReadState] = {}
        self._outdated: list[_ReadState] = []

    def __getitem__(self, parameter: torch.Tensor) -> State:
        if parameter in self._read:
            return self._read[parameter].state
        if self._read:  # a loop over all states has only one at a time in memory
            self._write_back(next(reversed(self._read)))
        subgroups = self._subgroups_of(parameter)
        if not subgroups and parameter in self._inner.state:
            kept: State = self._inner.state[parameter]
            return kept
        self._rank_shards.check_local(parameter, subgroups)
        states = self._rank_shards.copied_states(subgroups)
        self._read[parameter] = read = _ReadState(states.get(parameter, {}))
        return read.state  # without a state an empty one, like the defaultdict of a plain optimizer

    def __setitem__(self, parameter: torch.Tensor, state: State) -> None:
        subgroups = self._subgroups_of(parameter, {parameter: state})
        if not subgroups:
            self._inner.state[parameter] = state
            return
        own = self._rank_shards.own(subgroups)
        states = {**self._rank_shards.copied_states(own), parameter: state}
        self._read.pop(parameter, None)
        self._replaced()
        self._updater.replace_states(states, own)

    def _subgroups_of(self, parameter: torch.Tensor, *given: Any) -> list[Subgroup]:
        found = self._subgroups(*given)
        return [s for s in found if any(each.parameter is parameter for each in s.slices)]

    def write_back(self) -> None:
        """Write changed copies back, and forget those that nobody holds.

        Raises `OffloadError` if one was changed that a step has made obsolete.
        """
        if any([read.take_changes() for read in self._outdated]):
            raise OffloadError(
                "optimizer.state gives copies, and one that was read before the last step was "
                "changed after it. Read optimizer.state[parameter] again after each step."
            )
        self._outdated = [read for read in self._outdated if read.is_held()]
        for parameter in list(self._read):
            self._write_back(parameter)

    def _write_back(self, parameter: torch.Tensor) -> None:
        read = self._read.pop(parameter)
        if read.take_changes():
            self[parameter] = read.state
        if read.is_held():
            self._read[parameter] = read

    def states_change(self, *, replaced: bool = False) -> None:
        """Note that the states are about to differ from what was read, or are other ones."""
        self._outdated = [] if replaced else [*self._outdated, *self._read.values()]
        self._read.clear()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if self._subgroups_of(parameter):
            self[parameter] = {}
        else:
            del self._inner.state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        subgroups = self._subgroups()
        elsewhere = self._rank_shards.others(subgroups)
        seen = {id(each.parameter) for subgroup in elsewhere for each in subgroup.slices}
        for subgroup in self._rank_shards.own(subgroups):
            stored = {each.slice_index for each in subgroup.states.stored}
            for index, param_slice in enumerate(subgroup.slices):
                has_state = index in stored or subgroup.states.small[index]
                if has_state and id(param_slice.parameter) not in seen:
                    seen.add(id(param_slice.parameter))
                    yield param_slice.parameter
        yield from [each for each in self._inner.state if id(each) not in seen]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is own for own in self)
