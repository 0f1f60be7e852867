"""Paths with bytes per second: spaces that own files, backends that move bytes."""

from offload_strategy.storage.backend import (
    Backend,
    BlockRequest,
    available_backends,
    create_backend,
)
from offload_strategy.storage.capacity import check_capacities
from offload_strategy.storage.extents import Extent, ExtentAllocator
from offload_strategy.storage.foreign import ForeignFile
from offload_strategy.storage.paths import DirectoryReport, inspect_directory
from offload_strategy.storage.probe import PathBandwidth, probe
from offload_strategy.storage.space import Space
from offload_strategy.storage.turns import PathTurns
from offload_strategy.storage.workers import Workers

__all__ = [
    "Backend",
    "BlockRequest",
    "DirectoryReport",
    "Extent",
    "ExtentAllocator",
    "ForeignFile",
    "PathBandwidth",
    "PathTurns",
    "Space",
    "Workers",
    "available_backends",
    "check_capacities",
    "create_backend",
    "inspect_directory",
    "probe",
]
