"""Metrics for Prometheus, served over HTTP on the port that the config names."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import HTTPServer
from typing import Any

from offload_strategy.errors import ConfigError

#: How long a client may say nothing: others wait meanwhile, and so does the end of the server.
_SILENT_SECONDS = 5
_TIER = re.compile(r"offload/tier/(?P<tier>[^/]+)/(?P<name>.+)")


class PrometheusMetrics:
    """Serves metrics as gauges; each scrape reads them anew, on a thread of the server.

    ``offload/memory/pinned_bytes`` becomes ``offload_memory_pinned_bytes``, and
    ``offload/tier/ssd/used_bytes`` becomes ``offload_tier_used_bytes{tier="ssd"}``. Of several
    engines of one process that name the same port, the newest open one is served.

    The TCP `port` is that of all addresses of the machine; `read` returns the metrics. Raises
    ConfigError if prometheus-client is not installed, or the port cannot be opened.
    """

    def __init__(self, port: int, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read
        with _lock:
            if port not in _servers:
                _servers[port] = _Server(port)
            self._server = _servers[port]
            self._server.reads.append(read)

    def close(self) -> None:
        """Stop serving; with the last metrics of a port, its thread has ended when this returns."""
        with _lock:
            self._server.reads.remove(self._read)
            if self._server.reads:
                return
            _servers.pop(self._server.server_port, None)
        if threading.current_thread() is self._server.thread:  # garbage is collected there
            threading.Thread(target=self._server.stop, daemon=True).start()
        else:
            self._server.stop()


class _Server(HTTPServer):
    """A server with one thread, which answers one scrape after the other."""

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
            from prometheus_client.core import GaugeMetricFamily
        except ImportError:
            raise ConfigError(
                f"prometheus_port is {port}, but prometheus-client is not installed: "
                f"pip install 'offload-strategy[loggers]', or remove prometheus_port."
            ) from None

        class Handler(MetricsHandler):
            timeout = _SILENT_SECONDS

            def do_GET(self) -> None:
                try:
                    super().do_GET()
                except (RuntimeError, IndexError):  # an optimizer is attached, or the engine closed
                    self.send_error(503)

        self.reads: list[Callable[[], Mapping[str, float]]] = []
        self._gauge = GaugeMetricFamily
        registry = CollectorRegistry()
        registry.register(self)
        try:
            super().__init__(("", port), Handler.factory(registry))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"prometheus_port: port {port} cannot be opened ({error}). Choose a free one; a "
                f"process with local rank N uses prometheus_port + N."
            ) from error
        self.thread = threading.Thread(
            target=self.serve_forever, name="ssd-offload-prometheus", daemon=True
        )
        self.thread.start()

    def collect(self) -> Iterator[Any]:
        """Yield one gauge for each metric that is finite; those of tiers have the tier as label."""
        gauges: dict[str, Any] = {}
        for key, value in self.reads[-1]().items():
            if math.isfinite(value):
                of_tier = _TIER.fullmatch(key)
                name = f"offload/tier/{of_tier['name']}" if of_tier else key
                if name not in gauges:
                    labels = ["tier"] if of_tier else []
                    gauges[name] = self._gauge(name.replace("/", "_"), name, labels=labels)
                gauges[name].add_metric([of_tier["tier"]] if of_tier else [], value)
        yield from gauges.values()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self.thread.join()


# Re-entrant: an engine may be closed wherever garbage is collected.
_lock = threading.RLock()
_servers: dict[int, _Server] = {}


def _close_in_child() -> None:
    for server in _servers.values():
        server.socket.close()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
