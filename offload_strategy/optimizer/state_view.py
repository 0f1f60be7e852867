"""`optimizer.state` of an optimizer whose states are elsewhere: loaded when looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

from offload_strategy.optimizer.ranks.rank_shards import Shares
from offload_strategy.optimizer.state_dicts import replace_state, state_of
from offload_strategy.optimizer.states.subgroups import Subgroup
from offload_strategy.optimizer.subgroup_update import Updater


class StateView(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Parameter -> state dict, as `torch.optim.Optimizer.state`.

    Reading gives copies: change a state by assigning the whole dict back
    (``optimizer.state[p] = {...}``) or through `load_state_dict`.

    Args:
        updater: loads and stores states.
        subgroups: gives the subgroups of this moment.
        shares: tells those of this rank; those of others cannot be looked at here.
    """

    def __init__(
        self, updater: Updater, subgroups: Callable[[], list[Subgroup]], shares: Shares
    ) -> None:
        self._updater = updater
        self._all = subgroups
        self._shares = shares

    def _subgroups(self) -> list[Subgroup]:
        """Those of this rank."""
        return self._shares.own(self._all())

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._shares.check_here(parameter, self._all())
        state = state_of(parameter, self._subgroups(), self._updater)
        return {} if state is None else state  # as the defaultdict of a plain optimizer

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        known = any(
            piece.parameter is parameter for subgroup in self._all() for piece in subgroup.pieces
        )
        if not replace_state(parameter, state, self._subgroups(), self._updater) and not known:
            raise KeyError("this parameter does not belong to the optimizer")

    def __delitem__(self, parameter: torch.Tensor) -> None:
        self[parameter] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        own = self._subgroups()
        here = set(map(id, own))
        elsewhere = (subgroup for subgroup in self._all() if id(subgroup) not in here)
        seen = {id(piece.parameter) for subgroup in elsewhere for piece in subgroup.pieces}
        for subgroup in own:
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
