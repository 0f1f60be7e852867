"""The soak: a short one yields a report, and a leak shows as a slope."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak.report import SERIES, Results
from benchmarks.soak.slopes import slope

ROOT = Path(__file__).parents[2]


def series(seed: int, per_hour: float) -> list[tuple[float, float]]:
    """Two hours of samples, each much like the one before."""
    chance, noise, found = random.Random(seed), 0.0, []
    for number in range(720):
        noise = 0.8 * noise + chance.gauss(0, 1)
        found.append((10.0 * number, 500 + per_hour * number / 360 + noise))
    return found


def test_intervals_hold_the_true_slope_of_correlated_samples_as_often_as_they_say() -> None:
    found = [(slope(series(seed, rate)), rate) for seed in range(150) for rate in (0.0, 3.0)]
    held = sum(line is not None and line.low <= rate <= line.high for line, rate in found)
    assert 0.90 <= held / len(found) <= 0.99
    missed = sum(line is not None and line.is_flat for line, rate in found if rate)
    assert missed <= 0.02 * len(found)


def test_leaks_of_memory_and_files_are_reported_and_nothing_else(tmp_path: Path) -> None:
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
def test_a_soak_of_seconds_reports_runs_that_end_as_plain_ones(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file, disk = tmp_path / "found" / "soak.json", tmp_path / "disk"
    disk.mkdir()
    options = f"--hours 0.005 --seed 3 --json {file} --directory {disk}".split()
    command = [sys.executable, "-m", "benchmarks.soak", *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    found = json.loads(file.read_text())
    assert (run.returncode, found["finished"]) == (0, True), run.stdout + run.stderr[-3000:]
    assert {"same"} <= set(found["runs"]["verdicts"]) <= {"same", "refused"}
    assert list(disk.iterdir()) == []
