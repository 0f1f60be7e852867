"""Paths with bytes per second: spaces that own files, backends that move bytes."""

from offload_strategy.storage.backend import (
    Backend,
    BlockRequest,
    available_backends,
    create_backend,
)
from offload_strategy.storage.capacity import check_capacities
from offload_strategy.storage.devices import is_block_device
from offload_strategy.storage.extents import Extent, ExtentAllocator
from offload_strategy.storage.files import PageFile, create_unnamed, grow, switch_to_direct_io
from offload_strategy.storage.foreign import ForeignFile
from offload_strategy.storage.paths import DirectoryReport, inspect_directory, own_folder
from offload_strategy.storage.probe import PathBandwidth, probe
from offload_strategy.storage.remembered import (
    Figure,
    Figures,
    PathIdentity,
    cache_directory,
    corrected,
    recall_all,
)
from offload_strategy.storage.space import RESERVE_BYTES, Space
from offload_strategy.storage.turns import PathTurns
from offload_strategy.storage.workers import Workers

__all__ = [
    "RESERVE_BYTES",
    "Backend",
    "BlockRequest",
    "DirectoryReport",
    "Extent",
    "ExtentAllocator",
    "Figure",
    "Figures",
    "ForeignFile",
    "PageFile",
    "PathBandwidth",
    "PathIdentity",
    "PathTurns",
    "Space",
    "Workers",
    "available_backends",
    "cache_directory",
    "check_capacities",
    "corrected",
    "create_backend",
    "create_unnamed",
    "grow",
    "inspect_directory",
    "is_block_device",
    "own_folder",
    "probe",
    "recall_all",
    "switch_to_direct_io",
]
