"""This rank's share of one optimizer: which subgroups it updates, and what others have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.optimizer.overlap.backward_overlap import BackwardOverlap
from offload_strategy.optimizer.ranks.data_parallel_group import Team, TeamBook
from offload_strategy.optimizer.ranks.gradient_reductions import ReducedBackward
from offload_strategy.optimizer.ranks.rank_states import TeamStates
from offload_strategy.optimizer.state_dicts import streamed_states
from offload_strategy.optimizer.states.subgroups import State, Subgroup
from offload_strategy.optimizer.subgroup_update import Updater


class Shares:
    """What an optimizer has to do with other ranks; nothing, while it has no team.

    Args:
        book: knows the teams; None if this process trains by itself.
        updater: has the states of this rank.
        directories: where state dicts may lie; none for ordinary memory.
    """

    def __init__(
        self, book: TeamBook | None, updater: Updater, directories: Sequence[Path]
    ) -> None:
        self._book = book
        self._looked_at = -1
        self._has_gradients = False
        self._updater = updater
        self._directories = list(directories)
        self.team: Team | None = None
        self._reduced: ReducedBackward | None = None
        # What `consolidate` found, or the rank that has it.
        self._consolidated: dict[torch.Tensor, State] | None = None
        self._elsewhere: int | None = None

    def join(
        self, parameters: Callable[[], Iterable[torch.Tensor]], overlap: BackwardOverlap | None
    ) -> bool:
        """Look for the team, which may be made after the optimizer was attached.

        Args:
            parameters: of the optimizer.
            overlap: whose updates wait for the team's reductions from now on.

        Returns:
            Whether it was found just now.
        """
        book = self._book
        if self.team is not None or book is None or self._looked_at == book.changes:
            return False
        self._looked_at = book.changes
        self.team = book.team_of(parameters())
        if self.team is not None and overlap is not None:
            self._reduced = ReducedBackward(
                self.team, overlap.backward_begins, overlap.gradient_reduced, overlap.backward_over
            )
        return self.team is not None

    def first_gradient(self) -> None:
        """Before the first gradient is used, look once more: by now all models are spread."""
        if not self._has_gradients:
            self._has_gradients = True
            self._looked_at = -1

    def awaits_reduction(self, parameter: torch.Tensor) -> bool:
        """Note a gradient of this rank's; whether it is final only when it was reduced."""
        if self._reduced is None:
            return False
        self._reduced.notice(parameter)
        return True

    # ------------------------------------------------------------------ who updates what
    def deal(self, subgroup: Subgroup) -> None:
        """Give a new subgroup an owner."""
        if self.team is not None:
            subgroup.owner = self.team.deal(
                sum(param_slice.numel for param_slice in subgroup.slices)
            )

    def deal_anew(self) -> None:
        """All subgroups will be planned again."""
        if self.team is not None:
            self.team.deal_anew()

    def others(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Those of other ranks."""
        here = set(map(id, self.own(subgroups)))
        return [subgroup for subgroup in subgroups if id(subgroup) not in here]

    def own(self, subgroups: list[Subgroup]) -> list[Subgroup]:
        """Those that this rank updates, and has the states of."""
        team = self.team
        if team is None or not team.shares:
            return subgroups
        return [subgroup for subgroup in subgroups if subgroup.owner == team.rank]

    def check_here(self, parameter: torch.Tensor, subgroups: Sequence[Subgroup]) -> None:
        """Refuse to look at a state that other ranks have.

        Raises:
            OffloadError: they do.
        """
        team = self.team
        if team is None or not team.shares:
            return
        for subgroup in subgroups:
            there = any(param_slice.parameter is parameter for param_slice in subgroup.slices)
            if there and subgroup.owner != team.rank:
                raise OffloadError(
                    f"the state of this parameter of shape {tuple(parameter.shape)} is on rank "
                    f"{subgroup.owner} of {team.size}: call optimizer.state_dict() on all ranks, "
                    f"or set optimizer.sharding: false to have all states on every rank."
                )

    # ------------------------------------------------------------------ all states
    def states(self, subgroups: Sequence[Subgroup], where: str) -> dict[torch.Tensor, State]:
        """The states of all ranks; all of them have to ask, unless they were consolidated.

        Args:
            subgroups: all.
            where: what the user has called, for the message.

        Raises:
            OffloadError: other ranks did not come, or one of them has what was consolidated.
            TierFullError: there is no room for them.
            StorageError: states could not be read.
        """
        if self._consolidated is not None:
            return self._consolidated
        if self._elsewhere is not None and self.team is not None:
            raise OffloadError(
                f"the states were consolidated on rank {self._elsewhere}; this is rank "
                f"{self.team.rank}. Call {where} there, or call "
                f"consolidate_state_dict(to={self.team.rank}) on every rank."
            )
        if self.team is not None and self.team.shares:
            self.team.meet(where)
        return streamed_states(subgroups, self._reader(), self._directories)

    def consolidate(self, subgroups: Sequence[Subgroup], to: int, where: str) -> None:
        """Collect the states on one rank; see `OffloadedOptimizer.consolidate_state_dict`."""
        team, reader = self.team, self._reader()
        if team is None or not isinstance(reader, TeamStates):
            return
        self.states_change()
        team.meet(where)
        if team.rank == to:
            self._consolidated = streamed_states(subgroups, reader, self._directories)
        else:
            reader.serve(subgroups)
            self._elsewhere = to

    def states_change(self) -> None:
        """What was consolidated is out of date."""
        self._consolidated = self._elsewhere = None

    def _reader(self) -> Any:
        team = self.team
        return self._updater if team is None or not team.shares else TeamStates(team, self._updater)
