"""What this package does on a GPU, in a fixed time: bits first, then who is how fast.

    python -m benchmarks.gpu --minutes 8 --dir /mnt/nvme0 --json docs/results/gpu.json

In this order, each part with its share of the time: correctness on small models of Transformers;
what the link, the disk and the device can do; activations kept, computed again or moved (GPT, BERT
and T5 as wide as the smallest of SSDTrain's evaluation, table III); optimizer states beside every
peer that is installed; all of training; the largest model and the longest context under a cap of
device memory. Contenders are processes that take turns. JSON is written after every part.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceilings, correctness, limits, tables
from benchmarks.gpu.race import Deadline
from benchmarks.io.results import Result, table, write_json
from benchmarks.machine import describe_machine, say

_NEEDS = "needs a GPU that torch can use: torch.cuda.is_available() is False"
_PEERS = ("transformers", "accelerate", "trl", "torchao", "deepspeed", "kvikio-cu12")

#: Texts by title, results, figures.
_Found = tuple[dict[str, str], list[Result], dict[str, Any]]
#: What is done, and its share of the time.
_SHARES = {
    "correctness": 0.12, "ceilings": 0.06, "activations": 0.32, "states": 0.22, "both": 0.14,
    "limits": 0.14,
}  # fmt: skip


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--only", nargs="+", choices=_SHARES, default=list(_SHARES))
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    parser.add_argument("--device", default="cuda", help="cpu to see that everything runs")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(_NEEDS, file=sys.stderr)
        return 2
    machine = _describe(options)
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    deadline = Deadline(60 * options.minutes)
    texts: dict[str, str] = {}
    results: list[Result] = []
    figures: dict[str, Any] = {}
    shares = {name: _SHARES[name] for name in _SHARES if name in options.only}
    for name in list(shares):
        seconds = deadline.left * shares[name] / sum(shares.values())
        shares.pop(name)
        if seconds < 1:
            texts[name] = "no time was left for it"
            continue
        say(f"{name}: {seconds:.0f} s")
        try:
            more, claims, found = _PARTS[name](options, seconds)
        except Exception as error:  # the other parts are of interest all the same
            more, claims, found = {name: f"failed: {error!r}"}, [_failure(name)], {}
        texts |= more
        results += claims
        figures |= found
        if options.json is not None:
            rows = [result.as_dict() for result in results]
            write_json(options.json, machine, {"texts": texts, "results": rows, **figures})
    for title, text in texts.items():
        print(f"\n## {title}\n\n{text}")
    print("\n" + table(results))
    return int(any(result.judged and not result.held for result in results))


def _failure(name: str) -> Result:
    return Result(f"{name} ran", 0, 1, "runs", 0.0, 1.0)


def _describe(options: argparse.Namespace) -> dict[str, Any]:
    machine = describe_machine(options.dir)
    if options.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        machine["GPU"] = f"{device.name}, {device.total_memory / 2**30:.0f} GiB"
        machine["CUDA"] = torch.version.cuda
    machine["python"] = platform.python_version()
    for package in _PEERS:
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return machine


# ---------------------------------------------------------------------- the parts
def _correctness(options: argparse.Namespace, seconds: float) -> _Found:
    request = json.dumps({"device": options.device, "dir": str(options.dir)})
    try:
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.correctness", request],
            capture_output=True, text=True, timeout=seconds, check=False,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        printed, problem = run.stdout, run.stderr[-2000:] if run.returncode else ""
    except subprocess.TimeoutExpired as late:
        printed, problem = (late.stdout or b"").decode(), "the time was over"
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    rows = ["| model | what leaves | bits | |", "|---|---|---|---|"]
    for line in lines:
        bits = "the same" if line["same"] else f"differ: {line['differs']}"
        note = "" if line["repeats"] else "plain training does not repeat itself here"
        rows.append(f"| {line['model']} | {line['setting']} | {bits} | {note} |")
    judged = [line for line in lines if line["repeats"]]
    same = sum(line["same"] for line in judged)
    expected = len(correctness.MODELS) * len(correctness.SETTINGS)
    share = same / len(judged) if judged and len(lines) == expected else 0.0
    claim = Result("bits of plain training", same, len(judged), "trainings", share, 1.0)
    text = "\n".join(rows) + (f"\n\n{problem}" if problem else "")
    return {"Correctness": text}, [claim], {"correctness": lines}


def _ceilings(options: argparse.Namespace, seconds: float) -> _Found:
    text, results = ceilings.measure(options.dir, options.device, quick=options.quick)
    return {"What the machine can do": text}, results, {}


def _tables(which: tuple[tables.Table, ...]) -> Callable[[argparse.Namespace, float], _Found]:
    def part(options: argparse.Namespace, seconds: float) -> _Found:
        return tables.run(which, options.dir, seconds, device=options.device, quick=options.quick)

    return part


def _limits(options: argparse.Namespace, seconds: float) -> _Found:
    texts, results = limits.reach(options.dir, seconds, device=options.device, quick=options.quick)
    return texts, results, {}


_PARTS: dict[str, Callable[[argparse.Namespace, float], _Found]] = {
    "correctness": _correctness,
    "ceilings": _ceilings,
    "activations": _tables(tables.ACTIVATIONS),
    "states": _tables(tables.STATES),
    "both": _tables(tables.BOTH),
    "limits": _limits,
}


if __name__ == "__main__":
    sys.exit(main())
