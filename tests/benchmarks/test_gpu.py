"""The benchmark for GPUs: what it needs, what it says of what it found, and that it runs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import contenders, correctness, tables
from benchmarks.gpu.job import Job, tiny
from benchmarks.gpu.race import Deadline, Outcome, race
from benchmarks.turns import Turns

OURS = "ours: activations to disk"
TABLE = tables.ACTIVATIONS[0]


def ran(name: str, seconds: float, peak: float, loss: str = "0x1p0") -> Turns:
    step: dict[str, Any] = {
        "seconds": seconds, "forward_seconds": seconds / 3, "backward_seconds": seconds / 2,
        "update_seconds": seconds / 6, "peak_bytes": peak, "device_bytes": 2 * peak,
        "host_bytes": 1e9, "saved_bytes": 8e9, "left_bytes": 6e9, "loss": [loss],
        "gradients": ["aa"],
    }  # fmt: skip
    return Turns(name, [step, step])


def outcome(**changes: Any) -> Outcome:
    rows = {contenders.PLAIN: ran(contenders.PLAIN, 1.0, 8e9), OURS: ran(OURS, 1.0, 4e9)}
    return Outcome({**rows, **changes}, 1_000_000, {contenders.TRL: "needs trl"})


def held(found: Outcome) -> dict[str, bool]:
    results = TABLE.claims("GPT", found.rows) + tables.claims_about_bits(TABLE, found)
    return {result.name: result.held for result in results if result.judged}


def test_claims_hold_where_they_do() -> None:
    assert list(held(outcome()).values()) == [True, True, True]


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        (ran(OURS, 1.1, 4e9), "speed"),
        (ran(OURS, 1.0, 5e9), "activation peak"),
        (ran(OURS, 1.0, 4e9, loss="0x1p1"), "bits"),
    ],
)
def test_claims_do_not_hold_where_they_do_not(changed: Turns, lost: str) -> None:
    not_held = [name for name, holds in held(outcome(**{OURS: changed})).items() if not holds]
    assert len(not_held) == 1
    assert lost in not_held[0]


def test_a_table_says_who_did_not_take_part() -> None:
    text = tables.markdown(outcome(), TABLE.job)
    assert f"{contenders.TRL} did not take part: needs trl" in text
    assert f"| {OURS} | 16,384 | 1.000 |" in text


def test_jobs_travel_as_json() -> None:
    for table in (*tables.ACTIVATIONS, *tables.STATES, *tables.BOTH):
        for job in (table.job, tiny(table.job)):
            assert Job.of(json.loads(json.dumps(job.options()))) == job
            assert asdict(job) == job.options()


def test_contenders_take_turns_and_compute_the_same(tmp_path: Path) -> None:
    job = replace(tiny(TABLE.job), device="cpu")
    found = race([contenders.PLAIN, OURS], job, tmp_path, Deadline(200.0), rounds=3)
    assert not found.skipped
    assert len(found.rows[OURS].steps) >= 1
    assert all(result.held for result in tables.claims_about_bits(TABLE, found))
    assert list(tmp_path.iterdir()) == []


def test_models_of_the_first_part_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    options = json.dumps({"device": "cpu", "dir": str(tmp_path)})
    monkeypatch.setattr(sys, "argv", ["correctness", options])
    try:
        correctness.main()
    finally:
        torch.use_deterministic_algorithms(False)
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(lines) == len(correctness.MODELS) * len(correctness.SETTINGS)
    assert all(line["same"] and line["repeats"] for line in lines), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_in_one_line_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "needs a GPU" in said.err
