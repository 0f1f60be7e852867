"""The analytical front: what a run would need and do, from numbers alone.

From the shape of a transformer and the figures of a machine it tells what fits, how long a step
takes and what limits it, how much host memory and disk that needs, and how long the drives last.
Nothing here opens a device or a path.
"""

from offload_strategy.planning.analysis.hardware import Device, Drive, Drives, device, drive_set
from offload_strategy.planning.analysis.models import PRESETS, from_config, preset
from offload_strategy.planning.analysis.report import Analysis, analyse
from offload_strategy.planning.analysis.request import Prices, Request
from offload_strategy.planning.analysis.saved_tensors import Workload
from offload_strategy.planning.analysis.step_profile import StageStep, step_profile
from offload_strategy.planning.analysis.transformer import TransformerShape

__all__ = [
    "PRESETS",
    "Analysis",
    "Device",
    "Drive",
    "Drives",
    "Prices",
    "Request",
    "StageStep",
    "TransformerShape",
    "Workload",
    "analyse",
    "device",
    "drive_set",
    "from_config",
    "preset",
    "step_profile",
]
