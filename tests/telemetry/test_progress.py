"""Progress bars of long work: on a terminal, of one rank, and without a thread."""

import io
import threading
from typing import Any

import pytest
import torch
from torch import nn

import offload_strategy
from offload_strategy import OffloadEngine
from offload_strategy.telemetry import Progress
from tests.training import settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """The terminal on which every bar is shown at once."""
    found = Terminal()
    usual = Progress.__init__

    def at_once(self: Progress, what: str, total: float | None = None, **options: Any) -> None:
        usual(self, what, total, **{"delay": 0, "mininterval": 0, "file": found, **options})

    monkeypatch.setattr(Progress, "__init__", at_once)
    return found


def test_it_shows_what_is_done_its_rate_and_the_time_left(terminal):
    threads = threading.active_count()
    with Progress("saving", 4e9) as bar:
        bar.update(1e9)
        assert threading.active_count() == threads
    for text in ("saving:  25%", "1.00G/4.00G", "B/s]"):
        assert text in terminal.getvalue()


@pytest.mark.parametrize("why", ["short work", "another rank", "no terminal"])
def test_it_is_quiet_otherwise(why, monkeypatch):
    output = io.StringIO() if why == "no terminal" else Terminal()
    delay = 1000.0 if why == "short work" else 0.0
    monkeypatch.setenv("LOCAL_RANK", "1" if why == "another rank" else "0")
    with Progress("saving", 4, file=output, delay=delay, mininterval=0) as bar:
        bar.update(2)
        bar.update(2)
    assert output.getvalue() == ""


def test_weights_that_are_saved_and_loaded_have_bars_that_get_full(disk, tmp_path, terminal):
    pytest.importorskip("safetensors")
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    with OffloadEngine(settings(disk, parameters={"enabled": True, "min_size": 1024})) as engine:
        engine.attach(net)
        engine.save_weights(net, tmp_path)
        engine.load_weights(net, tmp_path)
    for what in ("saving weights", "loading weights"):
        assert f"{what}: 100%" in terminal.getvalue()


def test_modules_that_attach_initializes_are_counted(disk, terminal):
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    with OffloadEngine(settings(disk, parameters={"enabled": True, "min_size": 1024})) as engine:
        engine.attach(net)
    assert "attach: 100%" in terminal.getvalue()
    assert "3.00/3.00" in terminal.getvalue()


def test_a_checkpoint_that_is_written_tells_its_rate(tmp_path, terminal):
    offload_strategy.save({"x": torch.ones(1 << 22)}, tmp_path / "checkpoint.pt")
    assert "saving: 16.8MB" in terminal.getvalue()
