"""Whole training scripts of frameworks that know nothing of offloading, with it and without.

    python -m benchmarks.frameworks --dir /mnt/nvme0
    python -m benchmarks.frameworks --quick                 tiny models: to see that it runs

Lines:

    trainer     Transformers' Trainer, a Llama, by `accelerate launch`: clipping, accumulation, a
                schedule; with configs/accelerate/offload.yaml, and without our section of that file
    lightning   examples/lightning_gpt.py with clipping and accumulation: strategy "ssd_offload" and
                "auto"

Both learn real text. Every run is its own process, they take turns. Seconds are medians of the
steps after the first ones; the peak is the kernel's high-water mark of the process, libraries
included. The exit status is 1 if one loss or weight differs in its last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.io.results import Context, Result, Skipped, alternating, conclude, median_ratio
from benchmarks.machine import ALLOCATOR, allocator, describe_machine, say, tidy_up_when_ended
from offload_strategy.config import ACCELERATE_SECTION, DIRECTORY_VARIABLE
from offload_strategy.units import MiB

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_FILE = ROOT / "configs" / "accelerate" / "offload.yaml"
#: Steps that do not count: states are made, what leaves is learned.
_WARM_UP = 4
PLAIN, OFFLOADED = "plain", "offloaded"


@dataclass(frozen=True)
class Run:
    """What one process did.

    Args:
        seconds: of a step, a median.
        peak_bytes: the kernel's high-water mark of its resident memory.
        outcome: losses and digests, to the last bit.
    """

    seconds: float
    peak_bytes: float
    outcome: tuple[str, ...]


@dataclass
class Line:
    """A script that is run in two ways.

    Args:
        title: of it, for the table.
        needs: packages.
        run: has a process train, offloaded or not.
    """

    title: str
    needs: Sequence[str]
    run: Callable[[Context, bool], Run]


def _run_trainer(context: Context, offloaded: bool) -> Run:
    launch_file = LAUNCH_FILE
    if not offloaded:
        content = yaml.safe_load(LAUNCH_FILE.read_text())
        content.pop(ACCELERATE_SECTION)
        launch_file = context.directory / f"{PLAIN}.yaml"
        launch_file.write_text(yaml.safe_dump(content))
    sizes = ["--steps", "8", "--width", "64", "--layers", "2"] if context.quick else []
    command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config", str(launch_file)]
    command += [str(Path(__file__).with_name("llama_trainer.py")), *sizes]
    lines, peak = _lines(command, context)
    at = [moment for moment, line in lines if line.startswith("{'loss'")]
    steps = [after - before for before, after in pairwise(at)][_WARM_UP - 1 :]
    told = tuple(line for _, line in lines if line.startswith(("loss ", "weights ")))
    return Run(statistics.median(steps), peak, told)


def _run_lightning(context: Context, offloaded: bool) -> Run:
    figures = context.directory / "lightning.json"
    strategy = "ssd_offload" if offloaded else "auto"
    command = [str(ROOT / "examples" / "lightning_gpt.py"), f"--strategy={strategy}"]
    command += ["--no-compare", f"--json={figures}", f"--logdir={context.directory}"]
    command += ["--accumulate=2", "--clip=1.0", "--batch=16", "--steps=12"]
    command += ["--width=64", "--layers=2"] if context.quick else ["--width=512", "--layers=6"]
    _, peak = _lines(command, context)
    found: dict[str, Any] = json.loads(figures.read_text())
    outcome = [*found["losses"], *found["validation_losses"], found["parameters_sha256"]]
    tokens_of_step = 2 * 16 * 128
    return Run(tokens_of_step / found["tokens_per_second"], peak, tuple(map(str, outcome)))


def _lines(arguments: Sequence[str], context: Context) -> tuple[list[tuple[float, str]], int]:
    """Run Python: what it printed and when, and the peak of its memory, in bytes."""
    environment = {
        **os.environ,
        **ALLOCATOR,
        "PYTHONUNBUFFERED": "1",
        DIRECTORY_VARIABLE: str(context.directory),
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=context.directory,
            env=environment,
        )
        assert process.stdout is not None
        with process.stdout:
            lines = [(time.monotonic(), line.rstrip("\n")) for line in process.stdout]
        # Of the process and of those that it waited for: a launcher trains in a child.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(arguments)} failed:\n{errors.read()[-4000:]}")
    return lines, usage.ru_maxrss * 1024


LINES = {
    "trainer": Line(
        "Transformers' Trainer, Llama, `accelerate launch`",
        ("transformers", "accelerate"),
        _run_trainer,
    ),
    "lightning": Line("Lightning, GPT", ("lightning",), _run_lightning),
}


def compare(name: str, context: Context) -> tuple[str, list[Result]]:
    """Run a line, alternating; returns the rows of its table and the claims.

    Raises:
        Skipped: a package is missing.
    """
    line = LINES[name]
    if missing := [package for package in line.needs if find_spec(package) is None]:
        raise Skipped(f"not installed: {', '.join(missing)}")
    runs: dict[str, list[Run]] = {PLAIN: [], OFFLOADED: []}
    for number in range(context.repeats):
        for way in alternating((PLAIN, OFFLOADED), number):
            run = line.run(context, way == OFFLOADED)
            context.say(f"{name}, {way}: {run.seconds:.3f} s a step")
            runs[way].append(run)
    every = [*runs[PLAIN], *runs[OFFLOADED]]
    differ = sum(run.outcome != every[0].outcome for run in every)
    rows = "\n".join(
        f"| {line.title} | {way} | {statistics.median(run.seconds for run in runs[way]):.3f} "
        f"| {statistics.median(run.peak_bytes for run in runs[way]) / MiB:.0f} "
        f"| {len(runs[way][0].outcome) - 1} |"
        for way in runs
    )
    pairs = [
        ("a step", "s", "seconds", 1.0),
        ("peak of the process", "MiB", "peak_bytes", float(MiB)),
    ]
    results = [
        Result(f"{name}: runs whose losses and weights differ in a bit", differ, len(every), "runs",
               differ / len(every), 0.0, at_least=False)
    ]  # fmt: skip
    for what, unit, key, scale in pairs:
        ours, peer = ([getattr(run, key) / scale for run in runs[w]] for w in (OFFLOADED, PLAIN))
        results.append(
            Result(
                f"{name}: {what} relative to training without offload",
                statistics.median(ours),
                statistics.median(peer),
                unit,
                median_ratio(ours, peer),
                1.0,
                at_least=False,
                judged=False,
            )
        )
    return rows, results


def main() -> int:
    """Parse the options, run the lines, print and write the outcome."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frameworks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=2, help="alternations")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="small and few; figures mean little")
    options = parser.parse_args()
    tidy_up_when_ended()
    machine = {**describe_machine(options.dir), "allocator": allocator()}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    repeats = 1 if options.quick else options.repeats
    results: list[Result] = []
    skipped: dict[str, str] = {}
    table = [
        "| script | | step, s | peak of the process, MiB | losses |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="benchmarks-frameworks-", dir=options.dir) as folder:
        context = Context(Path(folder), repeats, options.quick, say)
        for name in options.lines:
            try:
                rows, found = compare(name, context)
            except Skipped as why:
                skipped[name] = str(why)
                print(f"skipped: {name}: {why}")
                continue
            table.append(rows)
            results += found
    text = "\n".join(table)
    print(f"\n{text}")
    outcome = {"repeats": repeats, "quick": options.quick, "skipped": skipped, "table": text}
    return conclude(results, options.json, machine, outcome)


if __name__ == "__main__":
    sys.exit(main())
