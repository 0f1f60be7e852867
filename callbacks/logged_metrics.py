"""What loggers get of an engine's metrics, in every framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from timeit import default_timer as perf_counter

from offload_strategy.telemetry import CLIENTS


class LoggedMetrics:
    """What loggers get of an engine: its finite metrics, and rates since the previous time.

    The engine counts from its start, and a curve of that only rises. So loggers also get
    ``offload/bandwidth/read_GBps`` and ``write_GBps``, and for each client
    ``offload/waits/<client>_share``, the share of the time in which training waited for it. The
    first interval begins with this object.

    Args:
        read: `OffloadEngine.metrics`.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._engine_metrics = read
        self._before = perf_counter(), read()

    def read(self) -> dict[str, float]:
        """Return the metrics, and begin the next interval."""
        (then, before), (now, after) = self._before, (perf_counter(), self._engine_metrics())
        self._before = now, after

        def per_second(*names: str) -> float:
            return sum(after[name] - before[name] for name in names) / max(now - then, 1e-9)

        rates = {
            f"offload/bandwidth/{name}_GBps": per_second(
                *(f"offload/{client}/{verb}_bytes" for client in CLIENTS)
            )
            / 1e9
            for name, verb in (("read", "read"), ("write", "written"))
        }
        for client in CLIENTS:
            waited = per_second(f"offload/{client}/stall_seconds")
            rates[f"offload/waits/{client}_share"] = waited
        return {key: value for key, value in after.items() if math.isfinite(value)} | rates
