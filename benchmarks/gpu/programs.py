"""Programs that have the device alone: the tests of accelerators, and sanitizers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import device
from benchmarks.gpu.contests import Found
from benchmarks.io.results import Result
from benchmarks.turns import Deadline, Ended, run_program

TESTS = ("tests/accelerator",)
_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_STARTED = re.compile(r"^(\S+?\.py::.+?)\s*$")
_COLLECTED = re.compile(r"collected (\d+) items?(?:.* (\d+) selected)?")
#: Processes that end in a test are followed by one that leaves that test out.
_MOST_STARTS = 4


def accelerator_tests(kind: str, seconds: float, tests: Sequence[str]) -> Found:
    """Run tests on a type of device until the time is over."""
    deadline = Deadline(seconds)
    outcomes: dict[str, str] = {}
    collected, complaints = 0, []
    for _ in range(_MOST_STARTS):
        left_out = [word for test in outcomes for word in ("--deselect", test)]
        options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=120"]
        environment = {"TEST_ACCELERATOR": kind, "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "pytest", *options, *tests, *left_out]
        ended = run_program(command, deadline.left, environment)
        begun = read_results(ended.lines, outcomes)
        found = [match for line in ended.lines if (match := _COLLECTED.search(line)) is not None]
        collected = collected or (int(found[0][2] or found[0][1]) if found else 0)
        if ended.status in (0, 1, None):
            break
        complaints.append(f"status {ended.status}: {ended.errors[-1000:]}")
        if begun is None or deadline.left <= 0:
            break
        outcomes[begun] = "CRASHED"  # the process ended in this test
    counts = Counter(outcomes.values())
    failed = [test for test, what in outcomes.items() if what in ("FAILED", "ERROR", "CRASHED")]
    figures = {
        "passed": counts["PASSED"],
        "failed": len(failed),
        "skipped": counts["SKIPPED"],
        "expected_failures": counts["XFAIL"],
        "unexpected_passes": counts["XPASS"],
        "not_run": max(0, collected - len(outcomes)),
    }
    text = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in figures.items())
    text += "".join(f"\n- {outcomes[test]}: {test}" for test in failed)
    ran = counts["PASSED"] + len(failed)
    share = counts["PASSED"] / ran if ran else 0.0
    claim = Result("tests of accelerators", counts["PASSED"], ran, "tests", share, 1.0)
    figures |= {"failures": failed, "complaints": complaints}
    return Found(figures, {"Tests on the device": text}, [claim])


def read_results(lines: Sequence[str], outcomes: dict[str, str]) -> str | None:
    """Add what pytest's lines say of tests; returns the test that had begun and has no result."""
    begun = None
    for line in lines:
        if (match := _RESULT.match(line)) is not None:
            outcomes[match[1]] = match[2]
            begun = None
        elif (match := _STARTED.match(line)) is not None:
            begun = match[1]
    return begun


def sanitizers(kind: str, directory: Path, seconds: float, *, seeds: int) -> Found:
    """Watch a short training: on CUDA with its sanitizers, on the simulated device with seeds."""
    request: dict[str, Any] = {"device": kind, "dir": str(directory), "models": ["GPT-2"]}
    training = [sys.executable, "-m", "benchmarks.gpu.correctness"]
    runs: dict[str, dict[str, Any]] = {}
    deadline = Deadline(seconds)
    if kind == "cuda":
        command = [*training, json.dumps(request)]
        ended = run_program(command, deadline.left / 2, {"TORCH_CUDA_SANITIZER": "1"})
        runs["TORCH_CUDA_SANITIZER"] = _watched(ended, "CSAN detected")
        program = shutil.which("compute-sanitizer")
        if program is None:
            runs["compute-sanitizer"] = {"reason": "compute-sanitizer is not installed"}
        else:
            # Without the caching allocator every tensor has borders of its own.
            watched = [program, "--tool", "memcheck", "--error-exitcode", "99", *command]
            ended = run_program(watched, deadline.left, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
            runs["compute-sanitizer"] = _watched(ended, "========= Invalid")
    else:
        why = {"reason": f"watches CUDA alone, and this is {kind}"}
        runs |= {"TORCH_CUDA_SANITIZER": why, "compute-sanitizer": why}
    for seed in range(seeds if kind == device.SIMULATED else 0):
        # It overwrites freed memory, and runs kernels and copies late, in an order by the seed.
        options = json.dumps({**request, "seed": seed, "delays": [100, 500]})
        ended = run_program([*training, options], deadline.left / (seeds - seed))
        runs[f"random delays, seed {seed}"] = _watched(ended)
    texts, claims = [], []
    for name, run in runs.items():
        if "reason" not in run:
            clean = float(run["clean"])
            claims.append(Result(f"{name} finds nothing", clean, 1, "runs", clean, 1.0))
        told = run.get("reason") or f"{run['findings']} findings, status {run['status']}"
        texts.append(f"- {name}: {told}")
    return Found(runs, {"Sanitizers": "\n".join(texts)}, claims)


def _watched(ended: Ended, finding: str = "\0") -> dict[str, Any]:
    """What came of a training, in whose output a sanitizer says so of each finding."""
    if ended.status is None:
        return {"reason": "it was not over in its time"}
    records = [json.loads(line) for line in ended.lines if line.startswith("{")]
    findings = ended.errors.count(finding) + sum(line.count(finding) for line in ended.lines)
    same = bool(records) and all(record["same"] for record in records)
    return {
        "status": ended.status,
        "findings": findings,
        "comparisons": records,
        "clean": ended.status == 0 and not findings and same,
        "output": "" if ended.status == 0 and not findings else ended.errors[-2000:],
    }
