"""The report of a run: its figures beside the metrics, and its page in a real browser."""

import html
import json
import logging
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from offload_strategy import ConfigError, OffloadConfig, OffloadEngine, OffloadError
from offload_strategy.engine.run_report import RunReport
from offload_strategy.units import MiB
from tests.training import Block, on_disk, settings

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
WIDTH, BATCH, LENGTH = 32, 8, 64


def train(engine: OffloadEngine, steps: int = 5, *, wait: bool = False) -> list[dict[str, float]]:
    """Train a few steps; return the metrics at the start of each, and at the end."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(WIDTH) for _ in range(3)))
    optimizer = engine.attach(net, torch.optim.AdamW(net.parameters()))
    seen = []
    for _ in range(steps):
        seen.append(engine.metrics())
        net(torch.randn(BATCH, LENGTH, WIDTH)).square().mean().backward()
        if wait:
            engine._resources.store.wait_for_writes()
        optimizer.step()
        optimizer.zero_grad()
        if wait:
            engine._resources.store.wait_for_writes()
    return [*seen, engine.metrics()]


def embedded(page: str) -> dict[str, Any]:
    """Return what the page draws its charts from."""
    (text,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', page, re.S)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def page_of_a_run(disk):
    pytest.importorskip("plotly")
    with OffloadEngine(settings(disk)) as engine:
        seen = train(engine, wait=True)
        return engine.report().page(), seen


# ---------------------------------------------------------------------- figures
def test_figures_of_the_page_are_the_sums_of_the_metrics(page_of_a_run):
    page, seen = page_of_a_run
    found = embedded(page)
    before, after = seen[-2:]
    for key in after:
        if key.endswith(("written_bytes", "read_bytes", "forwarded_bytes")):
            assert found["metrics"][key] == after[key]
    moved: dict[tuple[str, str], int] = {}
    for lane, client, begin, end, nbytes in found["timeline"]:
        assert begin <= end
        if lane.startswith("nvme "):
            key = client, lane.removeprefix("nvme ")
            moved[key] = moved.get(key, 0) + nbytes
    for client in ("activations", "optimizer"):
        for way, verb in (("read", "read"), ("write", "written")):
            key = f"offload/{client}/{verb}_bytes"
            assert moved[client, way] == after[key] - before[key] > 0
    waits = [end - begin for lane, _, begin, end, _ in found["timeline"] if lane == "waits"]
    waited = sum(
        after[f"offload/{client}/stall_seconds"] - before[f"offload/{client}/stall_seconds"]
        for client in ("activations", "optimizer")
    )
    # Shorter waits than 10 µs are counted, but not recorded.
    assert sum(waits) == pytest.approx(waited, abs=0.01)


def test_memory_is_told_when_tensors_are_saved_and_used(disk):
    with OffloadEngine(settings(disk, activations={"budget": 0})) as engine:
        train(engine)
        report, profile = engine.report(), engine.profile()
    saved = [span.nbytes for span in report.timeline if span.lane == "forward"]
    used = [span.nbytes for span in report.timeline if span.lane == "backward"]
    assert len(saved) == len(used) == len(profile.tensors)
    assert saved == [
        sum(one.nbytes for one in profile.tensors[: number + 1]) for number in range(len(saved))
    ]
    assert used[-1] == 0
    assert max(nbytes for _, nbytes in report.memory["without"]) == profile.peak_bytes == saved[-1]
    # Nothing leaves, so the two predictions are the same.
    assert max(nbytes for _, nbytes in report.memory["with offload"]) == profile.peak_bytes


def test_an_engine_that_offloads_no_activations_has_its_metrics(disk):
    with OffloadEngine(settings(disk, activations={"enabled": False})) as engine:
        train(engine)
        report, metrics = engine.report(), engine.metrics()
    assert report.timeline == ()
    assert report.comparison is None
    assert report.metrics["offload/optimizer/read_bytes"] == metrics["offload/optimizer/read_bytes"]
    assert "Too few steps" in str(report)


# ---------------------------------------------------------------------- files
def test_it_is_the_same_after_it_was_saved(disk, tmp_path):
    with OffloadEngine(settings(disk)) as engine:
        train(engine)
        report = engine.report()
        with pytest.raises(ConfigError, match="cannot be written"):
            report.save(tmp_path / "nowhere" / "run.json")
    report.save(tmp_path / "run.json")
    again = RunReport.load(tmp_path / "run.json")
    assert (again.timeline, again.comparison, again.changes) == (
        report.timeline, report.comparison, report.changes,
    )  # fmt: skip
    assert str(again) == str(report)
    assert "| step |" in str(report)
    with pytest.raises(OffloadError, match="closed"):
        engine.report()


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
            train(engine)
        assert RunReport.load(expected).timeline
        expected.unlink()
    with caplog.at_level(logging.WARNING, logger="offload_strategy"):
        OffloadEngine({**settings(disk), "report": str(tmp_path / "none" / "run.json")}).close()
    assert "the report of the run is not written" in caplog.text


def test_without_plotly_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload-strategy\[report\]'"):
        RunReport({}, "", ()).page()


# ---------------------------------------------------------------------- the page
def test_no_text_of_a_run_ends_the_script_that_it_is_in(tmp_path):
    pytest.importorskip("plotly")
    report = RunReport({}, "path: '</script><script>alert(1)</script>'", ())
    assert embedded(report.page())["config"] == report.config


def test_a_notebook_shows_the_whole_page_in_a_frame():
    pytest.importorskip("plotly")
    report = RunReport({}, "", ())
    (source,) = re.findall(r'srcdoc="([^"]*)"', report._repr_html_())
    assert html.unescape(source) == report.page()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome on $PATH")
def test_it_opens_in_a_browser_without_a_network_and_without_errors(page_of_a_run, tmp_path):
    page, seen = page_of_a_run
    file = tmp_path / "run.html"
    file.write_text(page)
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    tables = done.stdout[done.stdout.index("<main>") :]
    for client in ("activations", "optimizer"):
        written = seen[-1][f"offload/{client}/written_bytes"]
        assert f"<td>{client}</td><td>{written / MiB:.1f} MiB</td>".replace(".0 ", " ") in tables
    assert tables.count("js-plotly-plot") == 4
    for block in ("0", "1", "2", "3"):
        assert f">{block}</text>" in tables


def test_what_is_shown_to_others_has_no_home_directory_and_no_variable_of_the_environment(
    disk, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    files = [tmp_path / name for name in ("report.json", "trace.json", "profile.json", "page.html")]
    with OffloadEngine(settings(disk, optimizer={"enabled": False})) as engine:
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        engine.attach(model)
        for _ in range(3):
            loss = model(torch.randn(8, 32)).sum()
            on_disk(engine)
            loss.backward()
        (report := engine.report()).save(files[0])
        engine.export_trace(files[1])
        engine.profile().save(files[2])
        files[3].write_text(report.page())
    for file in files:
        assert str(tmp_path) not in (text := file.read_text()), file.name
        assert "hf_0123456789" not in text, file.name
    assert "~/disk" in files[1].read_text()
    # What was saved still works as a config for the same user.
    shown = OffloadConfig.load(yaml.safe_load(RunReport.load(files[0]).config))
    assert shown.tiers[0].path == disk
