"""What is seen while a run goes on: metrics for Prometheus, and progress bars of long work."""

import gc
import io
import math
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torch.optim import AdamW

import offload_strategy
from offload_strategy import ConfigError, OffloadEngine
from offload_strategy.telemetry import Progress, prometheus
from tests.engine.test_engine import model, train
from tests.training import settings


# ---------------------------------------------------------------------- Prometheus
def scraped(port):
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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return settings(disk, "1MiB") | {"prometheus_port": found.getsockname()[1]}


@pytest.fixture
def port(config):
    return config["prometheus_port"]


def test_a_scrape_finds_every_finite_metric_of_the_newest_open_engine(config, port):
    used = "offload/tier/host/used_bytes"
    with OffloadEngine(config) as engine:
        net = model()
        train(net, engine.attach(net, AdamW(net.parameters())))
        found, metrics = scraped(port), engine.metrics()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        assert found.keys() == finite.keys()
        for name in (used, "offload/memory/pinned_bytes"):
            assert found[name] == finite[name] > 0
        with OffloadEngine(config):
            assert scraped(port)[used] == 0
        assert scraped(port)[used] > 0


@pytest.mark.parametrize("close", [True, False])
def test_the_port_is_closed_with_the_engine(config, port, close, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    config["prometheus_port"] -= 1
    threads = {*threading.enumerate()}
    engine = OffloadEngine(config)
    assert scraped(port)
    if close:
        engine.close()
    del engine
    gc.collect()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(port)
    assert {*threading.enumerate()} <= threads


def test_an_engine_may_be_collected_on_the_thread_that_serves(config, port):
    engine = OffloadEngine(config)
    server, thread = prometheus._servers[port], prometheus._servers[port].thread
    cycle = [engine]
    cycle.append(cycle)
    server.service_actions = gc.collect
    del engine, cycle
    thread.join(timeout=60)
    assert not thread.is_alive()
    server.service_actions = lambda: None
    while any(other.name.startswith("ssd-offload") for other in threading.enumerate()):
        time.sleep(0.01)


def test_a_client_that_says_nothing_does_not_keep_a_thread(config, port, monkeypatch):
    monkeypatch.setattr(prometheus, "_SILENT_SECONDS", 0.1)
    threads = {*threading.enumerate()}
    with OffloadEngine(config), socket.create_connection(("127.0.0.1", port)):
        pass
    assert {*threading.enumerate()} <= threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_keep_the_port(config, port):
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
        assert scraped(port)
    os.close(begin)
    os.waitpid(child, 0)


def test_what_cannot_be_served_is_refused(config, port, monkeypatch):
    with socket.socket() as other:
        other.bind(("", port))
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


# ---------------------------------------------------------------------- progress bars
class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """The terminal on which every bar is shown at once."""
    found, usual = Terminal(), Progress.__init__

    def at_once(self, what, total=None, **options):
        usual(self, what, total, **{"delay": 0, "mininterval": 0, "file": found, **options})

    monkeypatch.setattr(Progress, "__init__", at_once)
    return found


def test_a_bar_shows_what_is_done_its_rate_and_the_time_left_without_a_thread(terminal):
    threads = {*threading.enumerate()}
    with Progress("saving", 4e9) as bar:
        bar.update(1e9)
        assert {*threading.enumerate()} <= threads
    for text in ("saving:  25%", "1.00G/4.00G", "B/s]"):
        assert text in terminal.getvalue()


@pytest.mark.parametrize(
    ("output", "delay", "rank"),
    [(Terminal(), 1000.0, "0"), (Terminal(), 0.0, "1"), (io.StringIO(), 0.0, "0")],
    ids=["short work", "another rank", "no terminal"],
)
def test_it_is_quiet_otherwise(output, delay, rank, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with Progress("saving", 4, file=output, delay=delay, mininterval=0) as bar:
        bar.update(2)
        bar.update(2)
    assert output.getvalue() == ""


def test_bars_of_weights_get_full(disk, tmp_path, terminal):
    pytest.importorskip("safetensors")
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    with OffloadEngine(settings(disk, parameters={"enabled": True, "min_size": 1024})) as engine:
        engine.attach(net)
        engine.save_weights(net, tmp_path)
        engine.load_weights(net, tmp_path)
    for text in ("attach: 100%", "3.00/3.00", "saving weights: 100%", "loading weights: 100%"):
        assert text in terminal.getvalue()


def test_a_checkpoint_that_is_written_tells_its_rate(tmp_path, terminal):
    offload_strategy.save({"x": torch.ones(1 << 22)}, tmp_path / "checkpoint.pt")
    assert "saving: 16.8MB" in terminal.getvalue()
