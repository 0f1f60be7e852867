"""`optimizer.state` of an optimizer whose states are elsewhere: loaded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.updates import Updater
from offload_strategy.optimizer.whole_states import replace_state, state_of


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
        state = state_of(parameter, self._subgroups(), self._updater)
        return {} if state is None else state  # as the defaultdict of a plain optimizer

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not replace_state(parameter, state, self._subgroups(), self._updater):
            raise KeyError("this parameter does not belong to the optimizer")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        seen = set()
        for subgroup in self._subgroups():
            named = {index for index, _ in subgroup.states.names}
            for index, piece in enumerate(subgroup.pieces):
                known = index in named or subgroup.states.small[index]
                if known and id(piece.parameter) not in seen:
                    seen.add(id(piece.parameter))
                    yield piece.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is own for own in self)
