"""Checkpoints that stream: state dicts that lie in a file, and files that are saved atomically.

Moves bytes between tensors and files and knows neither tickets nor optimizers, so it lies right
above storage and memory: optimizers, integrations and scripts use it alike.
"""

from offload_strategy.checkpoints.consolidation import consolidate
from offload_strategy.checkpoints.scratch_file import ScratchFile, Slot, scratch_directories
from offload_strategy.checkpoints.streaming_files import load, save, small_in_memory

__all__ = [
    "ScratchFile",
    "Slot",
    "consolidate",
    "load",
    "save",
    "scratch_directories",
    "small_in_memory",
]
