"""Records of transfers and stalls, from which all metrics are computed; logging; traces."""

from offload_strategy.telemetry.chrome_trace import write_trace
from offload_strategy.telemetry.log import get_logger
from offload_strategy.telemetry.recorder import (
    CLIENTS,
    Direction,
    MoveRecord,
    Recorder,
    StallRecord,
)

__all__ = [
    "CLIENTS",
    "Direction",
    "MoveRecord",
    "Recorder",
    "StallRecord",
    "get_logger",
    "write_trace",
]
