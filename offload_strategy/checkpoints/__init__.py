"""Streaming checkpoints: state dicts backed by a file, and files that are saved atomically."""

from offload_strategy.checkpoints.consolidation import consolidate
from offload_strategy.checkpoints.copy_on_write_maps import load
from offload_strategy.checkpoints.streaming_files import save

__all__ = ["consolidate", "load", "save"]
