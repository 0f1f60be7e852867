"""Weights: whose they are, and those that are in memory only while they are needed."""

from offload_strategy.parameters.registry import ParameterRegistry
from offload_strategy.parameters.saving import save_shards
from offload_strategy.parameters.stream import WeightStream

__all__ = ["ParameterRegistry", "WeightStream", "save_shards"]
