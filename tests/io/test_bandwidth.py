"""Rates of paths: estimated from completed requests, and saved from one run for the next."""

import json
import logging
import os
import stat
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest

from offload_strategy.io.bandwidth.estimator import BandwidthEstimator, Transferred
from offload_strategy.io.bandwidth.history import (
    CACHE_VARIABLE,
    MeasuredRate,
    PathIdentity,
    cache_directory,
    load_all_rates,
    load_rates,
    save_rates,
    updated_rate,
)
from offload_strategy.io.bandwidth.measured_paths import MeasuredPaths
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, MiB
from tests.io.backends import ManualBackend, submit

READ, WRITE = Direction.READ, Direction.WRITE
BLOCK = 4 * MiB


# ---------------------------------------------------------------------- estimates of a run
@pytest.fixture
def estimator():
    return BandwidthEstimator()


def run(estimator, way, rate, seconds, begin=0.0):
    """Requests at a steady rate, one at a time; returns when the last completed."""
    now = begin
    while now < begin + seconds:
        begun = estimator.begins(now, saturated=True)
        now += BLOCK / rate
        estimator.completed(way, BLOCK, now, begun, saturated=False)
    return now


def test_a_saturated_path_shows_its_rate_and_an_unknown_one_none(estimator):
    assert estimator.rate(READ) is None
    assert estimator.round_trip() is None
    end = run(estimator, WRITE, 300e6, 0.5)
    run(estimator, WRITE, 300e6, 0.5, begin=end + 100)  # the pause does not count
    assert estimator.rate(WRITE) == pytest.approx(300e6, rel=1e-3)
    assert estimator.rate(READ) is None
    assert estimator.round_trip() == pytest.approx(300e6, rel=1e-3)


def test_an_idle_path_does_not_change_the_estimate(estimator):
    estimator.seed(dict.fromkeys(Direction, 1e9))
    for second in range(10):  # a block per second, because nobody asks for more
        begun = estimator.begins(float(second), saturated=False)
        estimator.completed(READ, BLOCK, second + 0.9, begun, saturated=False)
    assert estimator.rate(READ) == pytest.approx(1e9)


def test_a_path_that_slows_down_is_noticed_within_a_second(estimator):
    end = run(estimator, WRITE, 150e6, 30.0)
    end = run(estimator, WRITE, 50e6, 0.5, begin=end)
    assert estimator.rate(WRITE) < 110e6
    run(estimator, WRITE, 50e6, 2.0, begin=end)
    assert 49e6 < estimator.rate(WRITE) < 60e6


def test_a_path_that_reads_and_writes_at_once_divides_its_time(estimator):
    now = 0.0
    begun = {way: estimator.begins(now, saturated=way is WRITE) for way in (READ, WRITE)}
    for _ in range(200):  # half-duplex: 4 ms for a block that is read, 12 for one that is written
        for way, seconds in ((READ, 0.004), (WRITE, 0.012)):
            now += seconds
            estimator.completed(way, BLOCK, now, begun[way], saturated=False)
            begun[way] = estimator.begins(now, saturated=True)
    assert estimator.rate(READ) == pytest.approx(BLOCK / 0.004, rel=0.02)
    assert estimator.rate(WRITE) == pytest.approx(BLOCK / 0.012, rel=0.02)


def test_a_burst_whose_completions_arrive_together_counts_from_its_begin(estimator):
    depth = 4
    for burst in range(10):  # 16 MiB in 8 ms, 100 ms apart; completed within 0.1 ms
        now = 0.1 * burst
        begun = [estimator.begins(now, saturated=slot + 1 == depth) for slot in range(depth)]
        for slot, each in enumerate(begun):
            end = now + 0.008 + 0.00001 * slot
            estimator.completed(READ, BLOCK, end, each, saturated=False)
    assert estimator.rate(READ) == pytest.approx(depth * BLOCK / 0.008, rel=0.01)


def test_the_sums_of_a_run_have_the_time_in_which_each_direction_was_full(estimator):
    for block in range(10):  # one now and then
        estimator.add_sustained(READ, 100, float(block), full=False)
    estimator.add_sustained(READ, 100, 30.0, full=True)
    assert estimator.sustained(READ) == Transferred(0, 0.0)
    for block in range(101):  # both at once: a path that does both has the sum
        estimator.add_sustained(WRITE, 100, 30.5 + block, full=True)
        estimator.add_sustained(READ, 200, 31.0 + block, full=True)
    assert estimator.sustained(WRITE) == Transferred(10000, 100.0)
    assert estimator.sustained(READ) == Transferred(20200, 101.0)


def test_only_a_queue_with_more_than_the_path_takes_counts_for_the_sums(plain):
    seen = []
    for pages in (8, 1):
        backend = ManualBackend(depth=2)
        queue = PathQueue(plain, backend, Recorder())
        for _ in range(8 // pages):
            submit(queue, 0, pages)
            backend.complete_all()
        assert queue.bandwidth.sustained(READ) == Transferred()
        seen.append(queue.bandwidth.sustained(WRITE))
    # Neither the first block, before which nothing was, nor the end, when slots were free.
    assert 4 * PAGE_BYTES <= seen[0].nbytes <= 7 * PAGE_BYTES
    assert seen[0].seconds > 0
    assert seen[1] == Transferred()


# ---------------------------------------------------------------------- saved rates
IDENTITY = PathIdentity("node7", "/mnt/nvme0", 12345, 2, "PosixBackend", 4)
RATES = {
    READ: MeasuredRate(3e9, "observed", 10**12, 7, "2026-01-02T03:04:05+00:00"),
    WRITE: MeasuredRate(2e9, "probe", 10**9),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "deep"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def test_saved_rates_are_loaded_for_their_identity_alone_and_the_latest_count(cache):
    assert (load_rates(IDENTITY), load_all_rates()) == ({}, [])
    assert not cache.exists()
    save_rates(IDENTITY, RATES)
    assert load_rates(IDENTITY) == RATES
    slower = {**RATES, READ: replace(RATES[READ], rate=1e9)}
    save_rates(IDENTITY, slower)
    assert load_all_rates() == [(IDENTITY, slower)]
    for field, value in asdict(IDENTITY).items():
        other = f"{value}8" if isinstance(value, str) else value + 1
        assert load_rates(replace(IDENTITY, **{field: other})) == {}
    # Only the owner may read them.
    assert [file.name for file in cache.iterdir()] == [IDENTITY.file_name]
    assert stat.S_IMODE((cache / IDENTITY.file_name).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_path_is_identified_by_its_file_system(tmp_path):
    identify = partial(PathIdentity.of, tmp_path, processes=1, backend=ManualBackend())
    with open(tmp_path / "file", "w") as here, open("/proc/version") as elsewhere:
        found = identify(here.fileno())
        assert found == identify(here.fileno())
        assert found.path == str(tmp_path)
        assert found != identify(elsewhere.fileno()), "another file system under the same path"


def test_the_default_is_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "offload-strategy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "offload-strategy"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() is None
    monkeypatch.setenv(CACHE_VARIABLE, "$SURELY_NOT_SET/cache")
    assert cache_directory() is None


def changed(**parts):
    good = {"format": 1, "of": asdict(IDENTITY), "read": asdict(RATES[READ])}
    return json.dumps({**good, **parts}).encode()


def with_rate(**fields):
    return changed(read={**asdict(RATES[READ]), **fields})


INVALID = {
    "empty": b"",
    "no JSON": b"{",
    "deep": b"[" * 50000,
    "another format": changed(format=2),
    "an identity of other fields": changed(of={"path": "/mnt"}),
    "somebody else's": changed(of={**asdict(IDENTITY), "machine": "node8"}),
    "a figure of other fields": changed(read={"rate": 1e9}),
    "a rate of 0": with_rate(rate=0),
    "NaN": with_rate(rate=float("nan")),
    "true": with_rate(rate=True),
    "an unknown source": with_rate(source="hearsay"),
    "other types": changed(read=["fast"], of=3),
    "large": changed(more="x" * 100_000),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", [*INVALID, "a pipe", "a symbolic link"])
def test_an_invalid_file_is_ignored_and_replaced(kind, cache, caplog, tmp_path):
    cache.mkdir(parents=True)
    file, elsewhere = cache / IDENTITY.file_name, tmp_path / "elsewhere.json"
    elsewhere.write_bytes(changed())
    if kind == "a pipe":  # must not be waited for
        os.mkfifo(file)
    elif kind == "a symbolic link":
        file.symlink_to(elsewhere)
    else:
        file.write_bytes(INVALID[kind])
    with caplog.at_level(logging.WARNING):
        assert load_rates(IDENTITY) == {}
    said = ["is ignored, and may be removed" in text for text in caplog.text.splitlines()]
    assert said == ([] if kind == "somebody else's" else [True]), "one line"
    other = replace(IDENTITY, machine="node9")
    save_rates(other, RATES)
    assert (other, RATES) in load_all_rates()  # not hidden by the invalid one
    save_rates(IDENTITY, RATES)
    assert load_rates(IDENTITY) == RATES
    assert elsewhere.read_bytes() == changed()


@pytest.mark.parametrize(
    ("observed", "after"), [(2.25e9, 1.5e9), (0.25e9, 0.5e9), (1e9, 1e9), (1e12, 2e9), (1e3, 0.5e9)]
)
def test_a_run_moves_a_rate_by_half_and_twofold_at_most(observed, after):
    found = updated_rate(MeasuredRate(1e9, "observed", 100, 3), observed, 50)
    assert (found.rate, found.nbytes, found.runs) == (pytest.approx(after), 150, 4)
    first = updated_rate(None, observed, 5)
    assert (first.rate, first.source, first.nbytes, first.runs) == (observed, "observed", 5, 1)
    assert first.date.endswith("+00:00")


def test_a_run_saves_once_what_it_saw_and_the_next_probes_what_is_unknown(plain, monkeypatch):
    probed = {READ: MeasuredRate(4e9, "probe", 10**9), WRITE: MeasuredRate(1e9, "probe", 10**8)}
    monkeypatch.setattr(sys.modules[MeasuredPaths.__module__], "probe", lambda *args: probed)
    runs = [MeasuredPaths(processes=1) for _ in range(2)]
    queues = [PathQueue(plain, ManualBackend(depth=2), Recorder()) for _ in range(2)]
    runs[0].add(queues[0], plain.path)
    for block in range(151):  # a queue that was full for two seconds
        seconds = block * BLOCK / 300e6
        queues[0].bandwidth.add_sustained(WRITE, BLOCK, seconds, full=True)
    runs[0].save()
    runs[1].add(queues[1], plain.path)
    runs[1].probe(queues[1])
    assert queues[1].bandwidth.rate(WRITE) == pytest.approx(300e6, rel=0.02)
    assert queues[1].bandwidth.rate(READ) == pytest.approx(4e9)
    ((identity, rates),) = load_all_rates()
    changed = {WRITE: replace(rates[WRITE], rate=1.0)}
    save_rates(identity, changed)
    runs[0].save()
    assert load_all_rates() == [(identity, changed)]
