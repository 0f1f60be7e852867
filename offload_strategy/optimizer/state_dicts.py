"""States by parameter, as users see them, of states that are stored by subgroup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from offload_strategy.optimizer.inner_guard import is_guard, own_call
from offload_strategy.optimizer.ranks.rank_shards import RankShards
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.subgroups import OpaqueTensor, State, Subgroup, packable
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
        or not all(map(is_guard, optimizer._optimizer_load_state_dict_pre_hooks.values()))
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


class StateView(MutableMapping[torch.Tensor, State]):
    """`optimizer.state`: parameter -> state dict, loaded when it is read.

    Reading gives copies: change a state by assigning the whole dict back (``optimizer.state[p] =
    {...}``) or through `load_state_dict`.
    """

    def __init__(
        self, updater: Updater, subgroups: Callable[[], list[Subgroup]], rank_shards: RankShards
    ) -> None:
        self._updater = updater
        self._subgroups = subgroups
        self._rank_shards = rank_shards

    def __getitem__(self, parameter: torch.Tensor) -> State:
        subgroups = self._subgroups_of(parameter)
        self._rank_shards.check_local(parameter, subgroups)
        states = self._rank_shards.copied_states(subgroups)
        return states.get(parameter, {})  # like the defaultdict of a plain optimizer

    def __setitem__(self, parameter: torch.Tensor, state: State) -> None:
        subgroups = self._subgroups_of(parameter)
        if not subgroups:
            raise KeyError("this parameter does not belong to the optimizer")
        own = self._rank_shards.own(subgroups)
        states = {**self._rank_shards.copied_states(own), parameter: state}
        self._updater.replace_states(states, own)

    def _subgroups_of(self, parameter: torch.Tensor) -> list[Subgroup]:
        return [s for s in self._subgroups() if any(p.parameter is parameter for p in s.slices)]

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

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

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is own for own in self)
