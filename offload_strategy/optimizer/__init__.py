"""Optimizer states on tiers: the user's own optimizer, subgroup by subgroup, exactly."""

from offload_strategy.optimizer.offloaded import OffloadedOptimizer
from offload_strategy.optimizer.ranks import TeamBook, check_parallel, local_processes
from offload_strategy.optimizer.states.precision import Precision
from offload_strategy.optimizer.states.shards import local_part
from offload_strategy.optimizer.timings import UpdateTiming
from offload_strategy.optimizer.user_class.support import check_supported

__all__ = [
    "OffloadedOptimizer",
    "Precision",
    "TeamBook",
    "UpdateTiming",
    "check_parallel",
    "check_supported",
    "local_part",
    "local_processes",
]
