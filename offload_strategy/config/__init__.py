"""What the user may configure, and where it is read from.

Imports nothing of the package but errors and units, and no torch, so that a launcher or the command
line can check a file in a moment.
"""

from offload_strategy.config.directories import DIRECTORY_VARIABLE as DIRECTORY_VARIABLE
from offload_strategy.config.directories import default_directory as default_directory
from offload_strategy.config.schema import ActivationsConfig as ActivationsConfig
from offload_strategy.config.schema import Client as Client
from offload_strategy.config.schema import ConfigSource as ConfigSource
from offload_strategy.config.schema import IOConfig as IOConfig
from offload_strategy.config.schema import MemoryConfig as MemoryConfig
from offload_strategy.config.schema import OffloadConfig as OffloadConfig
from offload_strategy.config.schema import OptimizerConfig as OptimizerConfig
from offload_strategy.config.schema import ParametersConfig as ParametersConfig
from offload_strategy.config.schema import PlanningConfig as PlanningConfig
from offload_strategy.config.sources import ACCELERATE_SECTION as ACCELERATE_SECTION
from offload_strategy.config.sources import CONFIG_VARIABLE as CONFIG_VARIABLE
from offload_strategy.config.sources import presets as presets
from offload_strategy.config.tier_config import TierConfig as TierConfig
