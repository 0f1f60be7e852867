"""Metrics for Prometheus, served over HTTP on the port that the config names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offload_strategy.errors import ConfigError

_TIER = re.compile(r"offload/tier/(?P<tier>[^/]+)/(?P<name>.+)")


class PrometheusServer:
    """Serves metrics as gauges; each scrape reads them anew, on a thread of the server.

    ``offload/memory/pinned_bytes`` becomes ``offload_memory_pinned_bytes``, and
    ``offload/tier/ssd/used_bytes`` becomes ``offload_tier_used_bytes{tier="ssd"}``.

    Args:
        port: TCP port, on all addresses of the machine.
        read: returns the metrics.

    Raises:
        ConfigError: prometheus-client is not installed, or the port cannot be opened.
    """

    def __init__(self, port: int, read: Callable[[], Mapping[str, float]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
            from prometheus_client.core import GaugeMetricFamily
        except ImportError:
            raise ConfigError(
                f"prometheus_port is {port}, but prometheus-client is not installed: "
                f"pip install 'offload-strategy[loggers]', or remove prometheus_port."
            ) from None
        self._read, self._gauge = read, GaugeMetricFamily
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"prometheus_port: port {port} cannot be opened ({error.strerror}). Choose a free "
                f"one; a process with local rank N uses prometheus_port + N."
            ) from error

    def describe(self) -> list[Any]:
        """Return nothing: what there is to read is known when it is read."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield one gauge for each metric that is finite; those of tiers have the tier as label."""
        gauges: dict[str, Any] = {}
        for key, value in self._read().items():
            if math.isfinite(value):
                of_tier = _TIER.fullmatch(key)
                name = f"offload/tier/{of_tier['name']}" if of_tier else key
                if name not in gauges:
                    labels = ["tier"] if of_tier else []
                    gauges[name] = self._gauge(name.replace("/", "_"), name, labels=labels)
                gauges[name].add_metric([of_tier["tier"]] if of_tier else [], value)
        yield from gauges.values()

    def close(self) -> None:
        """Stop serving; the thread has ended when this returns."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
