"""Saved rates of paths: private to their owner, corrected by halves, and never an error."""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

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
from offload_strategy.telemetry import Direction
from tests.io.backends import ManualBackend

READ, WRITE = Direction.READ, Direction.WRITE
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


def file_of(cache: Path) -> Path:
    return cache / IDENTITY.file_name


# ---------------------------------------------------------------------- saving
def test_saved_rates_are_loaded_for_their_identity_alone_and_the_latest_count(cache):
    assert load_rates(IDENTITY) == {}
    assert load_all_rates() == []
    assert not cache.exists()
    assert save_rates(IDENTITY, RATES)
    assert load_rates(IDENTITY) == RATES
    slower = {**RATES, READ: replace(RATES[READ], rate=1e9)}
    save_rates(IDENTITY, slower)
    assert load_all_rates() == [(IDENTITY, slower)]
    for field, value in asdict(IDENTITY).items():
        other = f"{value}8" if isinstance(value, str) else value + 1
        assert load_rates(replace(IDENTITY, **{field: other})) == {}
    # Only the owner may read them.
    assert stat.S_IMODE(file_of(cache).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [file.name for file in cache.iterdir()] == [IDENTITY.file_name]


def test_a_path_is_identified_by_its_file_system(tmp_path):
    backend = ManualBackend()

    def look(place):
        fd = os.open(place, os.O_RDONLY)
        try:
            return PathIdentity.of(tmp_path, fd, processes=1, backend=backend)
        finally:
            os.close(fd)

    assert look(tmp_path) == look(tmp_path)
    assert look(tmp_path).path == str(tmp_path)
    assert look(tmp_path) != look(Path("/proc")), "another file system under the same path"


def test_a_symbolic_link_is_not_followed(cache, tmp_path):
    save_rates(IDENTITY, RATES)
    file = file_of(cache)
    moved = file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(moved)
    assert load_rates(IDENTITY) == {}
    before = moved.read_text()
    save_rates(IDENTITY, {READ: RATES[READ]})
    assert moved.read_text() == before
    assert load_rates(IDENTITY) == {READ: RATES[READ]}


def test_files_of_half_a_year_ago_are_removed(cache):
    save_rates(IDENTITY, RATES)
    stale = cache / "stale.json"
    left = cache / "of-a-killed-process.partial"
    for file in (stale, left):
        file.write_text("{}")
        os.utime(file, (time.time() - 200 * 24 * 3600,) * 2)
    save_rates(IDENTITY, RATES)
    assert [file.name for file in cache.iterdir()] == [IDENTITY.file_name]


# ---------------------------------------------------------------------- where
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


# ---------------------------------------------------------------------- invalid files
def _changed(**parts: Any) -> str:
    good = {"format": 1, "of": asdict(IDENTITY), "read": asdict(RATES[READ])}
    return json.dumps({**good, **parts})


INVALID: dict[str, str | bytes] = {
    "empty": "",
    "no JSON": "{",
    "deep": "[" * 50000,
    "another format": _changed(format=2),
    "an identity of other fields": _changed(of={"path": "/mnt"}),
    "somebody else's": _changed(of={**asdict(IDENTITY), "machine": "node8"}),
    "a figure of other fields": _changed(read={"rate": 1e9}),
    "a rate of 0": _changed(read={**asdict(RATES[READ]), "rate": 0}),
    "NaN": _changed(read={**asdict(RATES[READ]), "rate": float("nan")}),
    "true": _changed(read={**asdict(RATES[READ]), "rate": True}),
    "an unknown source": _changed(read={**asdict(RATES[READ]), "source": "hearsay"}),
    "large": _changed(more="x" * 100_000),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("kind", [*INVALID, "a pipe"])
def test_an_invalid_file_is_ignored_and_replaced(kind, cache, caplog):
    cache.mkdir(parents=True)
    if kind == "a pipe":  # must not be waited for
        os.mkfifo(file_of(cache))
    else:
        content = INVALID[kind]
        file_of(cache).write_bytes(content.encode() if isinstance(content, str) else content)
    with caplog.at_level(logging.WARNING):
        assert load_rates(IDENTITY) == {}
    assert kind == "somebody else's" or "is ignored, and may be removed" in caplog.text
    other = replace(IDENTITY, machine="node9")
    assert save_rates(other, RATES)
    assert (other, RATES) in load_all_rates()  # not hidden by the invalid one
    assert save_rates(IDENTITY, RATES)
    assert load_rates(IDENTITY) == RATES


# ---------------------------------------------------------------------- corrections
@pytest.mark.parametrize(
    ("observed", "after"), [(2.25e9, 1.5e9), (0.25e9, 0.5e9), (1e9, 1e9), (1e12, 2e9), (1e3, 0.5e9)]
)
def test_a_run_moves_a_rate_by_half_and_twofold_at_most(observed, after):
    found = updated_rate(MeasuredRate(1e9, "observed", 100, 3), observed, 50)
    assert found.rate == pytest.approx(after)
    assert (found.nbytes, found.runs) == (150, 4)
    first = updated_rate(None, observed, 5)
    assert (first.rate, first.source, first.nbytes, first.runs) == (observed, "observed", 5, 1)
    assert first.date.endswith("+00:00")
