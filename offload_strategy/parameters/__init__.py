"""Weights: whose they are, and those that are in memory only while they are needed."""

from offload_strategy.parameters.checkpoint import read_index
from offload_strategy.parameters.loading import LoadedWeights, Loader
from offload_strategy.parameters.registry import ParameterRegistry
from offload_strategy.parameters.saving import named_tensors, save_shards
from offload_strategy.parameters.stream import WeightStream

__all__ = [
    "LoadedWeights",
    "Loader",
    "ParameterRegistry",
    "WeightStream",
    "named_tensors",
    "read_index",
    "save_shards",
]
