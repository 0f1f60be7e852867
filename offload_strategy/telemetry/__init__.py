"""Records of transfers and stalls, from which metrics are computed; logging; progress; traces."""

import logging
import os
from threading import RLock
from typing import Any

from tqdm import tqdm

from offload_strategy.telemetry.chrome_trace import json_for_others as json_for_others
from offload_strategy.telemetry.chrome_trace import write_trace as write_trace
from offload_strategy.telemetry.recorder import CLIENTS as CLIENTS
from offload_strategy.telemetry.recorder import Direction as Direction
from offload_strategy.telemetry.recorder import MoveRecord as MoveRecord
from offload_strategy.telemetry.recorder import Recorder as Recorder
from offload_strategy.telemetry.recorder import UpdateRecord as UpdateRecord


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


class Progress(tqdm):  # type: ignore[type-arg]
    """A progress bar of work that takes longer than a second, on the first rank's terminal."""

    monitor_interval = 0  # no thread
    _lock = RLock()  # nor a semaphore of the system

    def __init__(self, what: str, total: float | None = None, **options: Any) -> None:
        hidden = True if os.environ.get("LOCAL_RANK", "0") != "0" else None  # None: no terminal
        usual: dict[str, Any] = {"unit": "B", "unit_scale": True, "delay": 1.0, "disable": hidden}
        super().__init__(desc=what, total=total, leave=False, **(usual | options))
