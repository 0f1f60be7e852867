"""Metrics for Prometheus, read from the port that the config names."""

from __future__ import annotations

import gc
import math
import socket
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.optim import AdamW

from offload_strategy import ConfigError, OffloadEngine
from tests.engine.test_engine import model, train
from tests.training import settings


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def scraped(port: int) -> dict[str, float]:
    """What a scrape of the port finds, by the engine's own names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        for sample in family.samples:
            name = family.documentation
            if "tier" in sample.labels:
                name = name.replace("offload/tier/", f"offload/tier/{sample.labels['tier']}/")
            found[name] = sample.value
    return found


@pytest.fixture
def config(disk: Path) -> dict[str, Any]:
    return settings(disk, "1MiB") | {"prometheus_port": free_port()}


def test_a_scrape_finds_every_finite_metric(config: dict[str, Any]) -> None:
    with OffloadEngine(config) as engine:
        net = model()
        train(net, engine.attach(net, AdamW(net.parameters())))
        found, metrics = scraped(config["prometheus_port"]), engine.metrics()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        assert found.keys() == finite.keys()
        for name in ("offload/tier/host/used_bytes", "offload/memory/pinned_bytes"):
            assert found[name] == finite[name] > 0


def test_the_port_is_closed_with_the_engine_even_if_nobody_closes_it(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    port, config["prometheus_port"] = config["prometheus_port"], config["prometheus_port"] - 1
    threads = threading.active_count()
    for close in (True, False):
        engine = OffloadEngine(config)
        assert scraped(port)
        if close:
            engine.close()
        del engine
        gc.collect()
        with pytest.raises(urllib.error.URLError, match="refused"):
            scraped(port)
        assert threading.active_count() == threads


def test_what_cannot_be_served_is_refused(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with OffloadEngine(config), pytest.raises(ConfigError, match=r"cannot be opened .*in use"):
        OffloadEngine(config)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload-strategy\[loggers\]'"):
        OffloadEngine(config)
