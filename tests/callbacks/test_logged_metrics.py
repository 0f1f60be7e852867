"""What loggers get of an engine's metrics."""

from __future__ import annotations

import math

import pytest

from offload_strategy.callbacks import logged_metrics
from offload_strategy.callbacks.logged_metrics import LoggedMetrics


def test_loggers_get_rates_since_the_previous_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {
        f"offload/{client}/{figure}": 0.0
        for client in ("activations", "optimizer", "parameters")
        for figure in ("written_bytes", "read_bytes", "stall_seconds")
    }
    engine["offload/endurance/projected_years"] = math.nan
    now = [100.0]
    monkeypatch.setattr(logged_metrics, "perf_counter", lambda: now[0])
    logged, found = LoggedMetrics(lambda: dict(engine)), []
    for seconds, moved in ((2.0, 4e9), (4.0, 2e9)):
        now[0] += seconds
        engine["offload/activations/written_bytes"] += moved
        engine["offload/optimizer/written_bytes"] += moved
        engine["offload/optimizer/read_bytes"] += moved
        engine["offload/activations/stall_seconds"] += 1.0
        found.append(logged.read())
    for metrics, read, written, waited in zip(
        found, (2.0, 0.5), (4.0, 1.0), (0.5, 0.25), strict=True
    ):
        assert metrics["offload/bandwidth/read_GBps"] == read
        assert metrics["offload/bandwidth/write_GBps"] == written
        assert metrics["offload/waits/activations_share"] == waited
        assert metrics["offload/waits/optimizer_share"] == 0
        assert "offload/endurance/projected_years" not in metrics
    assert found[1]["offload/optimizer/read_bytes"] == 6e9  # counters stay as they are
