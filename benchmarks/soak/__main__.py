"""Hours of training with random models, configurations and faults.

    python -m benchmarks.soak --hours 2 [--seed S] [--json FILE] [--directory DIR] [--maps DIR]
    python -m benchmarks.soak --only-seed 17       # repeat one run
    python -m benchmarks.soak --json FILE [--plot PLOT.svg] [--table] [--copy FILE]

One process trains for the whole time and is sampled (`long`); beside it random runs, one at a time,
are killed, meet I/O errors and exceptions, go on from their checkpoints, and must end with the bits
of plain PyTorch (`processes`). Results are written every minute.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.machine import commit, describe_machine, say, tidy_up_when_ended, versions
from benchmarks.soak.processes import PATIENCE_SECONDS, Processes
from benchmarks.soak.report import SAMPLE_SECONDS, Results, plot, recomputed, table
from benchmarks.soak.runs import HOSTILITIES, drawn

_ROOT = Path(__file__).resolve().parents[2]
_WRITE_SECONDS = 60.0
#: Of a traceback within JSON, what comes before the package or folder of a file.
_PLACES = re.compile(r'File \\"[^"]*/(?=(?:site-packages|benchmarks|offload_strategy)/)')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; returns 1 if a run ended differently from plain PyTorch, or not at all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of the first random run")
    parser.add_argument("--json", type=Path, default=Path("soak.json"))
    parser.add_argument("--plot", type=Path, help="draw the results of --json")
    parser.add_argument("--table", action="store_true", help="print the results of --json")
    parser.add_argument("--copy", type=Path, help="write these results, slopes computed again")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--maps", help="keep the long process's memory maps here")
    parser.add_argument("--only-seed", type=int, help="repeat one run")
    parser.add_argument("--hostility", choices=sorted(HOSTILITIES), help="of --only-seed")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.only_seed is not None:
        run = drawn(options.only_seed, options.hostility)
        outcome = Processes(options.directory).outcome(run)
        outcome.run = asdict(run)
        print(json.dumps(asdict(outcome), indent=1))
        return int(outcome.verdict not in ("same", "refused"))
    if options.hours is not None:
        found = _soak(options)
    elif options.plot or options.table or options.copy:
        found = recomputed(json.loads(options.json.read_text()))
    else:
        parser.error("give --hours, --only-seed, --plot, --table or --copy")
    if options.copy is not None:
        text = json.dumps(found, indent=1)
        # Where a machine has its files says nothing about the errors.
        options.copy.write_text(_PLACES.sub(r'File \\"', text) + "\n")
    if options.plot is not None:
        plot(found, options.plot)
    if options.hours is not None or options.table:
        print(table(found), flush=True)
    return int(bool(found["bad outcomes"] or found["bad outcomes beside"] or found["incidents"]))


def _soak(options: argparse.Namespace) -> dict[str, object]:
    tidy_up_when_ended()
    began = time.time()
    until = began + 3600 * options.hours
    options.json.parent.mkdir(parents=True, exist_ok=True)
    lines = options.json.with_suffix(".lines")
    lines.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.directory) as place:
        # What paths were measured to give is kept between runs, as it is for everyone.
        os.environ["SSD_OFFLOAD_CACHE"] = str(Path(place, "cache"))
        about = {
            "machine": describe_machine(Path(place)),
            "versions": versions(("torch", "transformers", "numpy", "offload-strategy")),
            "commit": commit(_ROOT),
            "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)),
            "hours": options.hours,
            "seed": options.seed,
        }
        results = Results(about, began, lines)
        processes = Processes(Path(place))
        long = _Long(Path(place), lines, until, results, options.maps)
        try:
            written, seed = 0.0, options.seed
            while time.time() < until:
                long.look_after()
                outcome = processes.outcome(drawn(seed))
                results.outcomes.append(outcome)
                if outcome.verdict != "same":
                    say(f"seed {seed}, {outcome.factors['hostility']}: {outcome.verdict}: "
                        f"{' '.join(outcome.details)[-3000:]}")  # fmt: skip
                seed += 1
                if time.monotonic() - written > _WRITE_SECONDS:
                    written = time.monotonic()
                    found = results.write(options.json)
                    say(f"{len(results.outcomes)} runs, {found['runs']['verdicts']}")
        finally:
            long.end()
            results.write(options.json)
    left = [str(path) for path in options.directory.glob("soak-*") if str(path) == place]
    results.incidents += [f"{path} is left" for path in left]
    return results.write(options.json, finished=time.time() >= until)


class _Long:
    """The process of `long`, which is started again if it ends or hangs."""

    def __init__(
        self, place: Path, lines: Path, until: float, results: Results, maps: str | None
    ) -> None:
        self._options = {"directory": str(place), "file": str(lines), "until": until, "maps": maps}
        self._lines, self._until, self._results = lines, until, results
        self._log = lines.with_suffix(".log")
        self._process = self._started()

    def look_after(self) -> None:
        """Start it again if it has ended or is silent; that is an incident."""
        status = self._process.poll()
        age = time.time() - max(self._began, _changed_at(self._lines))
        silent = age > PATIENCE_SECONDS + SAMPLE_SECONDS
        if time.time() > self._until or (status is None and not silent):
            return
        what = f"is silent for {age:.0f} s" if status is None else f"ended with status {status}"
        if status is None:
            self._process.send_signal(10)  # SIGUSR1: it writes where it is to its log
            time.sleep(2)
            self._process.kill()
            self._process.wait()
        said = self._log.read_text(errors="replace")[-6000:]
        self._results.incidents.append(f"the long process {what}: {said}")
        say(self._results.incidents[-1])
        self._process = self._started()

    def end(self) -> None:
        """It ends by itself when the time is over, or else with this."""
        try:
            self._process.wait(PATIENCE_SECONDS if time.time() >= self._until else 0)
        except subprocess.TimeoutExpired:
            if time.time() >= self._until:
                self._results.incidents.append("the long process did not end")
            self._process.terminate()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        self._began = time.time()
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.soak.long", json.dumps(self._options)],
                stdout=log,
                stderr=log,
                cwd=_ROOT,
            )


def _changed_at(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


if __name__ == "__main__":
    sys.exit(main())
