"""Paths with bytes per second: spaces that own files, backends that move bytes."""

from offload_strategy.storage.backend import Backend, BlockRequest, create_backend
from offload_strategy.storage.extents import Extent, ExtentAllocator
from offload_strategy.storage.paths import DirectoryReport, inspect_directory
from offload_strategy.storage.space import Space

__all__ = [
    "Backend",
    "BlockRequest",
    "DirectoryReport",
    "Extent",
    "ExtentAllocator",
    "Space",
    "create_backend",
    "inspect_directory",
]
