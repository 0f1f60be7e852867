"""What the user may configure, and where it is read from.

Imports nothing of the package but errors and units, and no torch, so that a launcher or the command
line can check a file in a moment.
"""

from offload_strategy.config.directories import (
    DIRECTORY_VARIABLE,
    default_directory,
    is_memory_filesystem,
)
from offload_strategy.config.schema import (
    ActivationsConfig,
    Client,
    ConfigSource,
    IOConfig,
    MemoryConfig,
    OffloadConfig,
    OptimizerConfig,
    ParametersConfig,
    PlanningConfig,
)
from offload_strategy.config.sources import ACCELERATE_SECTION, CONFIG_VARIABLE, presets
from offload_strategy.config.tier_config import TierConfig

__all__ = [
    "ACCELERATE_SECTION",
    "CONFIG_VARIABLE",
    "DIRECTORY_VARIABLE",
    "ActivationsConfig",
    "Client",
    "ConfigSource",
    "IOConfig",
    "MemoryConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParametersConfig",
    "PlanningConfig",
    "TierConfig",
    "default_directory",
    "is_memory_filesystem",
    "presets",
]
