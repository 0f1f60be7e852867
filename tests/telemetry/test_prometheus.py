"""Metrics for Prometheus, read from the port that the config names."""

import gc
import math
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.optim import AdamW

from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.telemetry import prometheus
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
def config(disk):
    return settings(disk, "1MiB") | {"prometheus_port": free_port()}


def test_a_scrape_finds_every_finite_metric(config):
    with OffloadEngine(config) as engine:
        net = model()
        train(net, engine.attach(net, AdamW(net.parameters())))
        found, metrics = scraped(config["prometheus_port"]), engine.metrics()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        assert found.keys() == finite.keys()
        for name in ("offload/tier/host/used_bytes", "offload/memory/pinned_bytes"):
            assert found[name] == finite[name] > 0


def test_the_port_is_closed_with_the_engine_even_if_nobody_closes_it(config, monkeypatch):
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
        assert threading.active_count() <= threads  # those of an earlier test may have ended


def test_of_several_engines_the_newest_open_one_is_served(config, disk):
    used, port = "offload/tier/host/used_bytes", config["prometheus_port"]
    with OffloadEngine(config) as first:
        net = model()
        train(net, first.attach(net, AdamW(net.parameters())))
        assert scraped(port)[used] > 0
        second = OffloadEngine(config)
        assert scraped(port)[used] == 0
        second.close()
        assert scraped(port)[used] > 0


def test_an_engine_may_be_collected_on_the_thread_that_serves(config):
    engine = OffloadEngine(config)
    port = config["prometheus_port"]
    server, thread = prometheus._servers[port], prometheus._servers[port].thread
    cycle = [engine]
    cycle.append(cycle)
    server.service_actions = gc.collect  # type: ignore[method-assign]
    del engine, cycle
    thread.join(timeout=60)
    assert not thread.is_alive()
    server.service_actions = lambda: None  # type: ignore[method-assign]
    while any(other.name.startswith("ssd-offload") for other in threading.enumerate()):
        time.sleep(0.01)


def test_a_client_that_says_nothing_does_not_keep_a_thread(config, monkeypatch):
    monkeypatch.setattr(prometheus._Handler, "timeout", 0.1)
    threads = threading.active_count()
    with (
        OffloadEngine(config),
        socket.create_connection(("127.0.0.1", config["prometheus_port"])),
    ):
        pass
    assert threading.active_count() == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_keep_the_port(config):
    end, begin = os.pipe()
    engine = OffloadEngine(config)
    child = os.fork()
    if child == 0:
        os.close(begin)
        os.read(end, 1)  # until the parent has closed its end
        os._exit(0)
    os.close(end)
    engine.close()
    with OffloadEngine(config):
        assert scraped(config["prometheus_port"])
    os.close(begin)
    os.waitpid(child, 0)


def test_what_cannot_be_served_is_refused(config, monkeypatch):
    with socket.socket() as other:
        other.bind(("", config["prometheus_port"]))
        other.listen()
        with pytest.raises(ConfigError, match=r"cannot be opened .*in use"):
            OffloadEngine(config)
    monkeypatch.setenv("LOCAL_RANK", "65535")
    with pytest.raises(ConfigError, match=r"cannot be opened .*0-65535"):
        OffloadEngine(config)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload-strategy\[loggers\]'"):
        OffloadEngine(config)
