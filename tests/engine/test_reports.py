"""What the engine reports: metrics, the wear of drives, and a page that a real browser shows."""

import html
import json
import logging
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from torch import nn
from torch.optim import AdamW

from offload_strategy import ConfigError, OffloadConfig, OffloadEngine
from offload_strategy.engine.run_report import RunReport
from offload_strategy.host_memory.c_allocator import FreedMemory
from offload_strategy.units import MiB
from tests.engine.test_engine import model, train
from tests.training import Block, on_disk, settings


# ---------------------------------------------------------------------- metrics
def contract_keys(tiers):
    """The keys that scripts outside of the project rely on."""
    moved = ("written_bytes", "read_bytes", "forwarded_bytes", "stall_seconds")
    figures = {
        **dict.fromkeys(("activations", "optimizer", "parameters"), moved),
        **{f"tier/{name}": ("used_bytes", "read_GBps", "write_GBps") for name in tiers},
        "memory": ("pinned_bytes", "pinned_peak_bytes", "fragmentation"),
        "host": ("rss_bytes",),
        "device": ("peak_bytes",),
        "endurance": ("written_bytes", "projected_years"),
    }
    return {f"offload/{of}/{figure}" for of, names in figures.items() for figure in names}


@pytest.mark.parametrize("tiers", [["nvme"], ["host"], ["host", "nvme"]], ids=str)
def test_every_metric_of_the_contract_is_there(disk, tiers):
    config = settings(disk if "nvme" in tiers else None, "1MiB" if "host" in tiers else None)
    with OffloadEngine(config) as engine:
        net = model()
        optimizer = engine.attach(net, AdamW(net.parameters()))
        found = [engine.metrics()]
        train(net, optimizer)
        found.append(engine.metrics())
        engine.close()
        found.append(engine.metrics())
    for metrics in found:
        assert contract_keys(tiers) <= metrics.keys()
        assert math.isnan(metrics.pop("offload/endurance/projected_years")), "no drive has a rating"
        for key, value in metrics.items():
            assert key.startswith("offload/")
            assert type(value) is float
            assert 0 <= value < math.inf, key
    if "host" in tiers:  # host memory does not wear out, and has room for all of it
        assert found[1]["offload/endurance/written_bytes"] == 0
        assert found[1]["offload/tier/host/used_bytes"] > 0


def test_metrics_say_what_was_moved(disk):
    whole = {"overlap": "off", "subgroup_size": "auto"}
    config = settings(disk, activations={"min_size": "4KiB"}, optimizer=whole)
    config["tiers"][0]["endurance_tbw"] = 100
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    with OffloadEngine(config) as engine:
        optimizer = engine.attach(net, AdamW(net.parameters()))
        loss = net(torch.randn(32, 64)).pow(2).sum()  # of 8 KiB
        on_disk(engine)
        # The input and what tanh saved; the square's input is outside of the model.
        activations = 2 * 32 * 64 * 4
        metrics = engine.metrics()
        assert metrics["offload/activations/written_bytes"] == activations
        assert metrics["offload/tier/nvme/used_bytes"] == activations
        assert metrics["offload/activations/read_bytes"] == 0
        assert metrics["offload/memory/pinned_bytes"] == 0
        loss.backward()
        del loss
        metrics = engine.metrics()
        assert metrics["offload/activations/read_bytes"] == activations
        assert metrics["offload/tier/nvme/used_bytes"] == 0
        optimizer.step()
        on_disk(engine)
        metrics, moves = engine.metrics(), list(engine._recorder.moves)
    states = 2 * 2 * 64 * 64 * 4  # two moments of two layers
    assert metrics["offload/optimizer/written_bytes"] == states
    assert metrics["offload/tier/nvme/used_bytes"] == states
    assert metrics["offload/endurance/written_bytes"] == activations + states
    assert sum(m.nbytes for m in moves if m.direction == "write") == activations + states
    assert metrics["offload/memory/pinned_peak_bytes"] >= 2 * 64 * 64 * 4
    assert metrics["offload/host/rss_bytes"] > 50 * MiB
    assert 0 <= metrics["offload/memory/fragmentation"] < 1
    assert metrics["offload/activations/forwarded_bytes"] == 0
    for verb in ("written", "read", "forwarded"):
        assert metrics[f"offload/parameters/{verb}_bytes"] == 0
    rates = "tier/nvme/write_GBps", "tier/nvme/read_GBps"
    for name in ("activations/stall_seconds", "endurance/projected_years", *rates):
        assert metrics[f"offload/{name}"] > 0


def test_a_run_that_wears_its_drives_is_told_once(disk, caplog):
    config = settings(disk)
    config["tiers"][0] |= {"endurance_tbw": 1e-6, "endurance_share": 0.5}  # a megabyte
    with OffloadEngine(config) as engine, caplog.at_level("WARNING", logger="offload_strategy"):
        for nbytes in (400_000, 600_000, 1_000_000):
            net = nn.Linear(1, nbytes // 8, bias=False)
            optimizer = engine.attach(net, AdamW(net.parameters()))  # two states of 4 bytes
            net(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            on_disk(engine)
            engine._metrics.warn_about_wear()
            assert ("rated for" in caplog.text) == (nbytes > 400_000)
        metrics = engine.metrics()
    assert metrics["offload/endurance/written_bytes"] >= 2_000_000
    per_day = metrics["offload/endurance/written_bytes_per_day"]
    assert per_day > metrics["offload/endurance/written_bytes"]
    (told,) = (text for text in caplog.messages if "rated for" in text)
    assert told.startswith("tier nvme: this process has written")


@pytest.mark.parametrize("is_short", [False, True])
def test_that_offload_is_not_needed_is_said_once(disk, caplog, monkeypatch, is_short):
    if is_short:
        # Memory of freed tensors, which the C library keeps, is free as well.
        monkeypatch.setattr(FreedMemory, "nbytes", lambda _: 0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    net = model()
    with OffloadEngine(settings(disk)) as engine, caplog.at_level(logging.INFO, "offload_strategy"):
        train(net, engine.attach(net, AdamW(net.parameters())), 5)
    said = [text for text in caplog.messages if "not needed" in text]
    assert len(said) == (not is_short)
    for text in said:
        assert re.search(r"offload is not needed here: the .*iB that it moves would fit", text)


# ---------------------------------------------------------------------- the report of a run
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def train_blocks(engine, steps=5, *, wait=False):
    """Train a few steps; return the metrics at the start of the last."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(3)))
    optimizer = engine.attach(net, AdamW(net.parameters()))
    for _ in range(steps):
        before = engine.metrics()
        net(torch.randn(8, 64, 32)).square().mean().backward()
        if wait:
            on_disk(engine)
        optimizer.step()
        optimizer.zero_grad()
        if wait:
            on_disk(engine)
    return before


def embedded(page):
    """What the page draws its charts from."""
    (text,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page, re.S)
    return json.loads(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The report of a training, and the metrics before and after its last step."""
    with OffloadEngine(settings(tmp_path_factory.mktemp("disk"))) as engine:
        before = train_blocks(engine, wait=True)
        return engine.report(), before, engine.metrics()


def test_figures_of_the_page_are_the_sums_of_the_metrics(run):
    pytest.importorskip("plotly")
    report, before, after = run
    found = embedded(report.page())
    for key in after:
        if key.endswith(("written_bytes", "read_bytes", "forwarded_bytes")):
            assert found["metrics"][key] == after[key]
    moved, waits = Counter(), 0.0
    for lane, client, begin, end, nbytes in found["timeline"]:
        assert begin <= end
        moved[client, lane.removeprefix("nvme ")] += nbytes
        waits += (end - begin) * (lane == "waits")
    for client in ("activations", "optimizer"):
        for way, verb in (("read", "read"), ("write", "written")):
            key = f"offload/{client}/{verb}_bytes"
            assert moved[client, way] == after[key] - before[key] > 0
    stalls = [f"offload/{client}/stall_seconds" for client in ("activations", "optimizer")]
    # Shorter waits than 10 µs are counted, but not recorded.
    assert waits == pytest.approx(sum(after[key] - before[key] for key in stalls), abs=0.01)


def test_memory_is_told_when_tensors_are_saved_and_used(disk):
    with OffloadEngine(settings(disk, activations={"budget": 0})) as engine:
        train_blocks(engine)
        report, profile = engine.report(), engine.profile()
    saved = [span.nbytes for span in report.timeline if span.lane == "forward"]
    used = [span.nbytes for span in report.timeline if span.lane == "backward"]
    assert saved == list(accumulate(one.nbytes for one in profile.tensors))
    assert len(saved) == len(used)
    assert used[-1] == 0
    # Nothing leaves, so the two predictions are the same.
    for prediction in report.memory.values():
        assert max(nbytes for _, nbytes in prediction) == profile.peak_bytes == saved[-1]
    assert report.memory.keys() == {"without", "with offload"}


def test_it_is_the_same_after_it_was_saved_and_in_a_notebook(run, tmp_path):
    pytest.importorskip("plotly")
    report, *_ = run
    with pytest.raises(ConfigError, match="cannot be written"):
        report.save(tmp_path / "nowhere" / "run.json")
    report.save(tmp_path / "run.json")
    again = RunReport.load(tmp_path / "run.json")
    for name in ("timeline", "comparison", "changes"):
        assert getattr(again, name) == getattr(report, name)
    assert str(again) == str(report)
    assert "| step |" in str(report)
    (source,) = re.findall(r'srcdoc="([^"]*)"', report._repr_html_())
    assert html.unescape(source) == report.page()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1, "metrics": 3}'])
def test_something_else_is_refused_with_a_word(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read as the report of a run.*report: FILE"):
        RunReport.load(tmp_path / "other.json")


def test_the_config_names_a_file_that_is_written_at_the_end(disk, tmp_path, monkeypatch, caplog):
    file = tmp_path / "run.json"
    for rank, expected in ((None, file), ("0", file), ("3", tmp_path / "run-3.json")):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        with OffloadEngine({**settings(disk), "report": str(file)}) as engine:
            train_blocks(engine)
        assert RunReport.load(expected).timeline
        expected.unlink()
    folder = tmp_path / "none"
    lost = {**settings(disk), "report": str(folder / "run.json")}
    with pytest.raises(
        ConfigError, match=r"run\.json cannot be written: its folder does not exist"
    ):
        OffloadEngine(lost)
    folder.mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        OffloadEngine({**settings(disk), "report": str(folder)})
    with caplog.at_level(logging.WARNING, logger="offload_strategy"):
        engine = OffloadEngine(lost)
        folder.rmdir()
        engine.close()
    assert "the report of the run is not written" in caplog.text


def test_without_plotly_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload-strategy\[report\]'"):
        RunReport({}, "", ()).page()


def test_no_text_of_a_run_ends_the_script_that_it_is_in():
    pytest.importorskip("plotly")
    report = RunReport({}, "path: '</script><script>alert(1)</script>'", ())
    assert embedded(report.page())["config"] == report.config


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on $PATH")
def test_it_opens_in_a_browser_without_a_network_and_without_errors(run, tmp_path):
    report, _, metrics = run
    file = tmp_path / "run.html"
    file.write_text(report.page())
    options = [
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
        "disable-background-networking", "disable-component-update", "enable-logging=stderr",
        "virtual-time-budget=10000", "dump-dom", f"user-data-dir={tmp_path / 'profile'}",
        "host-resolver-rules=MAP * ~NOTFOUND",
    ]  # fmt: skip
    command = [BROWSER, *(f"--{option}" for option in options), file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    tables = done.stdout[done.stdout.index("<main>") :]
    for client in ("activations", "optimizer"):
        written = metrics[f"offload/{client}/written_bytes"]
        assert f"<td>{client}</td><td>{written / MiB:.1f} MiB</td>".replace(".0 ", " ") in tables
    assert tables.count("js-plotly-plot") == 4
    for block in range(4):
        assert f">{block}</text>" in tables


def test_what_is_shown_to_others_names_no_user_and_no_secret(disk, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    files = [tmp_path / name for name in ("report.json", "trace.json", "profile.json", "page.html")]
    with OffloadEngine(settings(disk, optimizer={"enabled": False})) as engine:
        train_blocks(engine, steps=3, wait=True)
        report = engine.report()
        report.save(files[0])
        engine.export_trace(files[1])
        engine.profile().save(files[2])
        files[3].write_text(report.page())
    for file in files:
        text = file.read_text()
        assert str(tmp_path) not in text, file.name
        assert "hf_0123456789" not in text, file.name
    assert "~/disk" in files[1].read_text()
    # What was saved still works as a config for the same user.
    shown = OffloadConfig.load(yaml.safe_load(RunReport.load(files[0]).config))
    assert shown.tiers[0].path == disk
