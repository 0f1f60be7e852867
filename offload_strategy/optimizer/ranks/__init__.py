"""Ranks of data-parallel training that share the work of one optimizer."""

from offload_strategy.optimizer.ranks.reductions import ReducedBackward
from offload_strategy.optimizer.ranks.states import TeamStates
from offload_strategy.optimizer.ranks.team import (
    Deliveries,
    Team,
    TeamBook,
    check_parallel,
    local_processes,
)

__all__ = [
    "Deliveries",
    "ReducedBackward",
    "Team",
    "TeamBook",
    "TeamStates",
    "check_parallel",
    "local_processes",
]
