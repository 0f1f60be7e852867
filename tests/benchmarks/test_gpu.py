"""The evidence kit for accelerators: every part runs, and says of what it found what it should."""

import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from benchmarks.device_traces import read_trace
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import contenders as who
from benchmarks.gpu import contests, programs
from benchmarks.turns import Ended
from tests.module_map import ROOT

CONTEST = contests.ACTIVATIONS[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="the simulated accelerator is compiled")
def test_every_part_runs_on_the_simulated_accelerator(tmp_path, disk):
    pytest.importorskip("transformers")
    file = tmp_path / "found" / "sim.json"
    # What starts programs of its own is below.
    parts = [name for name in gpu.SHARES if name not in ("tests", "sanitizers")]
    command = [
        sys.executable, "-m", "benchmarks.gpu", "--device", "sim", "--brief", "--minutes", "20",
        "--dir", str(disk), "--json", str(file), "--only", *parts,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    found = json.loads(file.read_text())
    problems = {name: part["reason"] for name, part in found["parts"].items() if part["reason"]}
    assert problems == {}, run.stderr[-3000:]
    assert list(found["parts"]) == parts
    claims = [claim for part in found["parts"].values() for claim in part["claims"]]
    assert [one["name"] for one in claims if one["judged"] and not one["held"]] == []
    assert len(claims) > 15
    assert found["simulated"]
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_in_one_line_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "needs an accelerator" in said.err


# ---------------------------------------------------------------------- claims
def ran(seconds=1.0, peak=8e9, loss="0x1p0"):
    step = {"seconds": seconds, "launch_seconds": seconds / 2, "peak_bytes": peak}
    parts = [{"part": "step", "predicted": 2.0, "observed": 1.0, "ratio": 0.5, "unit": "s"}]
    return {
        "parameters": 1_000_000, "losses": [loss], "gradients": ["aa"], "steps": [step, step],
        "prediction": {"parts": parts},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "lost"),
    [
        (ran(peak=4e9), []),
        (ran(seconds=1.1, peak=4e9), ["speed"]),
        (ran(peak=5e9), ["activation peak"]),
        (ran(peak=4e9, loss="0x1p1"), ["bits"]),
    ],
    ids=["all", "slower", "larger", "different"],
)
def test_claims_hold_where_they_do(ours, lost):
    rows = {who.PLAIN: ran(), who.TO_DISK: ours}
    claims = contests.claims("GPT", rows, CONTEST.names, judged=True)
    assert len(claims) == 3
    not_held = [claim.name for claim in claims if not claim.held]
    assert len(not_held) == len(lost)
    assert all(word in name for word, name in zip(lost, not_held, strict=True))
    text = contests.markdown(rows, {who.TRL: "needs trl"}, CONTEST.job)
    assert f"{who.TRL} did not take part: needs trl" in text
    assert f"| {who.PLAIN} | 1.638e+04 | 1 | 1 | 0.5 |" in text
    # A large model must train where plain training cannot.
    large = contests.claims("7B", {who.LARGE: ran()}, contests.LARGE.names, judged=True)
    held = {claim.name.partition(": ")[2] for claim in large if claim.held}
    assert held >= {f"{who.PLAIN} is out of memory", f"{who.LARGE} trains"}
    assert f"{who.LARGE_STREAMED} trains" not in held


# ---------------------------------------------------------------------- what others print
def test_a_trace_says_who_waits_and_what_overlaps(tmp_path):
    def event(cat, name, ts, dur, tid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    calls = [("cudaEventSynchronize", 1), ("cudaMemcpyAsync", 1), ("cudaMemcpy", 1)]
    calls += [("cudaEventSynchronize", 7), ("cudaHostRegister", 7), ("cudaMalloc", 1)]
    events = [
        event("cpu_op", "aten::mm", 0, 1),  # no thread that moves bytes, as 7 does
        *(event("cuda_runtime", name, 5, 9, tid=tid) for name, tid in calls),
        event("kernel", "gemm", 0, 100),
        event("kernel", "gemm", 50, 100),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 100, 100, bytes=64),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 300, 50, bytes=32),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 50, bytes=16),
        {"ph": "M", "name": "process_name", "tid": 0},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = read_trace(file)
    assert found["waits"] == {"cudaEventSynchronize": 1, "cudaMemcpy": 1}
    assert found["registrations"] == {"cudaHostRegister": 1}
    assert found["allocations"] == {"cudaMalloc": 1}
    assert found["copies"]["DtoH"]["bytes"] == 64
    assert found["copies"]["HtoD"]["number"] == 1
    assert found["overlap"] == pytest.approx(50 / 150)


def test_results_of_tests_are_read_from_what_pytest_prints(monkeypatch):
    file = "tests/accelerator/test_a.py"
    died = [
        "collecting ... collected 4 items",
        f"{file}::test_one[host memory] PASSED      [ 25%]",
        f"{file}::test_two SKIPPED (needs CUDA)     [ 50%]",
        f"{file}::test_three[some host memory] ",
    ]
    ends = [Ended(-11, died, "Segmentation fault"), Ended(0, [f"{file}::test_four PASSED"], "")]
    program = Mock(side_effect=ends)
    monkeypatch.setattr(programs, "run_program", program)
    found = programs.accelerator_tests("sim", 100.0, [file])
    (command, *_), _ = program.call_args
    assert command[-2:] == ["--deselect", f"{file}::test_three[some host memory]"]
    counts = {name: found.figures[name] for name in ("passed", "skipped", "failed", "not_run")}
    assert counts == {"passed": 2, "skipped": 1, "failed": 1, "not_run": 0}
    assert not found.claims[0].held
