"""Runs of benchmarks: their page is made from figures alone, and what fails or leaks is told."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.allocators import Allocator
from benchmarks.parameters.job import Job
from benchmarks.parameters.largest import Bounds, Trained, doubling
from benchmarks.parameters.running import run as run_job
from benchmarks.soak.report import SERIES, Results
from benchmarks.soak.slopes import slope
from benchmarks.suite import __main__ as suite
from benchmarks.suite.page import write_page
from tests.module_map import ROOT
from tests.support import run_python


# ---------------------------------------------------------------------- the page
# It has claims that hold and do not, in one run and in two, tables, parts that were skipped or not
# run, machines, and causes of distances from the roofline.
def test_the_page_in_the_repository_is_that_of_its_figures():
    copy = suite.PAGE.with_name(".results-as-rebuilt.md")
    try:
        write_page(suite.FIGURES, copy, suite.FIGURES / suite.SECOND)
        assert copy.read_text() == suite.PAGE.read_text()
    finally:
        copy.unlink(missing_ok=True)


@pytest.mark.parametrize("end", ["by itself", "slow", "SIGTERM"])
def test_a_part_that_writes_nothing_fails_and_one_that_is_slow_ends_as_does_one_of_an_ended_suite(
    end, tmp_path, monkeypatch, capsys
):
    def wait(timeout=None):
        if end == "SIGTERM" and timeout is not None:
            signal.raise_signal(signal.SIGTERM)
        if end == "slow" and timeout is not None:
            raise subprocess.TimeoutExpired("slow", timeout)
        return 3

    program = Mock(wait=wait)
    start = Mock(return_value=program)
    monkeypatch.setattr(subprocess, "Popen", start)
    page = tmp_path / "page.md"
    words = ["--only", "io", "--quick", "--figures", str(tmp_path), "--out", str(page)]
    monkeypatch.setattr(sys, "argv", ["suite", *words])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert suite.main() == 1
        assert ("io: ended after 2 minutes" in capsys.readouterr().err) is (end == "slow")
        assert "Not run here" in page.read_text()
    except SystemExit:
        assert end == "SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "--json" in start.call_args.args[0]
    assert program.terminate.call_count == (end != "by itself")


# ---------------------------------------------------------------------- allocators
#: Frees and asks again for 16 MiB ten times; prints pages that the kernel had to give for it.
TEN_TIMES = """
import resource, sys
from benchmarks.allocators import Allocator
import torch
Allocator[sys.argv[1]].begin()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def once():
    torch.ones(4 << 20)
once()
before = faults()
for _ in range(10):
    once()
print(faults() - before)
"""


def _pages(kind, environment):
    command = [sys.executable, "-c", TEN_TIMES, kind.name]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(Allocator.best() is not Allocator.CACHES, reason="oneTBB is for x86-64 Linux")
def test_the_caching_allocator_has_freed_memory_at_hand_and_is_missed_by_the_loader():
    done = _pages(Allocator.CACHES, Allocator.CACHES.environment())
    assert int(done.stdout) < 5 * 4096, done.stderr  # pages of 4 KiB; without a cache 10 * 4096
    done = _pages(Allocator.CACHES, {"LD_PRELOAD": ""})
    assert done.returncode != 0
    assert "preloaded, but is not there" in done.stderr


def test_without_the_caching_allocator_memory_is_given_back(monkeypatch):
    monkeypatch.setattr("benchmarks.allocators._LIBRARIES", ("libno.so.2", "libnone.so.2"))
    assert Allocator.best() is Allocator.GIVES_BACK
    assert Allocator.best().environment() == {}
    done = _pages(Allocator.GIVES_BACK, {})
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    a_page = (2 << 20) if huge.exists() and "[always]" in huge.read_text() else (4 << 10)
    assert int(done.stdout) >= 10 * ((16 << 20) // a_page), done.stderr


# ---------------------------------------------------------------------- the largest model
@pytest.mark.parametrize(
    ("most", "bounds", "tried", "parameters", "why"),
    [
        # Layers are doubled until a model does not train, or halved until the first one does.
        (6, {}, [1, 2, 4, 8], 400, "8 layers: killed"),
        (3, {"first": 16}, [16, 8, 4, 2], 200, "4 layers: killed"),
        (0, {"first": 4}, [4, 2, 1], None, "1 layer: killed"),
        (99, {"most": 5}, [1, 2, 4], 400, "no larger one was tried"),
    ],
)
def test_the_largest_model_that_trains_is_found(most, bounds, tried, parameters, why):
    seen = []

    def attempt(layers):
        seen.append(layers)
        return Trained(100 * layers, layers, 1.0, 0) if layers <= most else "killed"

    found = doubling(attempt, Bounds(limit=0, **bounds))
    assert (seen, found.why) == (tried, why)
    assert (found.parameters if found.best else None) == parameters


@pytest.mark.slow
def test_a_run_tells_why_it_failed_and_one_that_takes_too_long_is_ended(tmp_path):
    quiet = Mock()
    job = Job(64, 1, vocabulary=64, sequence=8, steps=10**9)
    failed = run_job(replace(job, directory=str(tmp_path / "nowhere")), say=quiet)
    assert failed.status == 1
    assert "there is no directory" in failed.complaint
    assert not failed.killed
    ended = run_job(replace(job, steps=1), say=quiet)
    assert (ended.status, len(ended.of("step")), len(ended.of("end"))) == (0, 1, 1)
    late = run_job(job, say=quiet, seconds=0.5)
    assert late.overdue
    assert not late.killed


# ---------------------------------------------------------------------- the soak
def series(seed, per_hour):
    """Two hours of samples, each much like the one before."""
    chance, noise, found = random.Random(seed), 0.0, []
    for number in range(720):
        noise = 0.8 * noise + chance.gauss(0, 1)
        found.append((10.0 * number, 500 + per_hour * number / 360 + noise))
    return found


def test_intervals_hold_the_true_slope_of_correlated_samples_as_often_as_they_say():
    found = [(slope(series(seed, rate)), rate) for seed in range(150) for rate in (0.0, 3.0)]
    held = sum(line is not None and line.low <= rate <= line.high for line, rate in found)
    assert 0.90 <= held / len(found) <= 0.99
    missed = sum(line is not None and line.is_flat for line, rate in found if rate)
    assert missed <= 0.02 * len(found)


def test_leaks_of_memory_and_files_are_reported_and_nothing_else(tmp_path):
    lines = tmp_path / "soak.lines"
    with open(lines, "w") as file:
        for seconds, value in series(1, 12.0):
            sample = dict.fromkeys(SERIES, 7.0)
            sample |= {"resident memory": value, "open files": 20 + seconds // 900}
            file.write(json.dumps({"time": seconds, "process": 1, "samples": sample}) + "\n")
        file.write('{"time": 1, "half a l')
    found = Results({}, 0.0, lines).write(tmp_path / "soak.json", finished=True)
    leaks = [name for name, line in found["slopes"].items() if not line["zero_inside"]]
    assert leaks == ["resident memory", "open files"]
    assert json.loads((tmp_path / "soak.json").read_text())["units"] == SERIES


@pytest.mark.slow
def test_a_soak_of_seconds_reports_runs_that_end_as_plain_ones(tmp_path, disk):
    pytest.importorskip("transformers")
    file = tmp_path / "found" / "soak.json"
    options = f"--hours 0.002 --seed 3 --json {file} --directory {disk}".split()
    run_python("-m", "benchmarks.soak", *options, timeout=600)
    found = json.loads(file.read_text())
    assert found["finished"] is True
    assert {"same"} <= set(found["runs"]["verdicts"]) <= {"same", "refused"}
