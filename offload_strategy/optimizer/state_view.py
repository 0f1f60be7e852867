"""`optimizer.state` of an optimizer whose states are elsewhere: loaded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from offload_strategy.optimizer.subgroups import Subgroup
from offload_strategy.optimizer.updates import Updater


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Parameter -> state dict, as `torch.optim.Optimizer.state`.

    Reading gives copies: change a state by assigning the whole dict back
    (``optimizer.state[p] = {...}``) or through `load_state_dict`.

    Args:
        updater: loads and stores states.
        subgroups: gives the subgroups of this moment.
    """

    def __init__(self, updater: Updater, subgroups: Callable[[], list[Subgroup]]) -> None:
        self._updater = updater
        self._subgroups = subgroups

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        for subgroup, index in self._find(parameter):
            return self._updater.copies(subgroup)[index]
        return {}  # as the defaultdict of a plain optimizer

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        for subgroup, index in self._find(parameter):
            states = self._updater.copies(subgroup)
            states[index] = dict(state)
            self._updater.absorb(subgroup, states)
            return
        raise KeyError("this parameter does not belong to the optimizer")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        for subgroup in self._subgroups():
            named = {index for index, _ in subgroup.states.names}
            for index, parameter in enumerate(subgroup.parameters):
                if index in named or subgroup.states.small[index]:
                    yield parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is own for own in self)

    def _find(self, parameter: torch.Tensor) -> Iterator[tuple[Subgroup, int]]:
        for subgroup in self._subgroups():
            for index, own in enumerate(subgroup.parameters):
                if own is parameter:
                    yield subgroup, index
                    return
