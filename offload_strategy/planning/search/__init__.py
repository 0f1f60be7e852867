"""The search: of all settings of a machine the fastest, by the analytical front, as a config."""

from offload_strategy.planning.search.best import search
from offload_strategy.planning.search.config import config_yaml
from offload_strategy.planning.search.cores import Cores, CpuRequest
from offload_strategy.planning.search.found import Candidate, Found, Refusal, Space

__all__ = [
    "Candidate",
    "Cores",
    "CpuRequest",
    "Found",
    "Refusal",
    "Space",
    "config_yaml",
    "search",
]
