"""Records of transfers and stalls, from which all metrics are computed; logging; traces."""

import logging

from offload_strategy.telemetry.chrome_trace import write_trace
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


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module of this package.

    Training scripts rarely configure logging, and Python then drops everything below a warning. So,
    as Lightning and Transformers do, the package has a handler, which is inactive if the root
    logger has one.
    """
    package = logging.getLogger("offload_strategy")
    if not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ssd-offload: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        package.addHandler(handler)
        package.setLevel(logging.INFO)
    return logging.getLogger(name)
