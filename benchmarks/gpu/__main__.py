"""The evidence on an accelerator, in a fixed time: bits and order first, then memory and speed.

    python -m benchmarks.gpu --minutes 25 --dir /mnt/nvme0
    python -m benchmarks.gpu --only bits trace --minutes 5     adds to the same file of results
    python -m benchmarks.gpu --device sim --quick              every part, on the simulated device

One process has the device at a time. Figures are written as JSON after each part, with the machine
and the versions: for a real device to docs/results/gpu, for the simulated one, or a quick run, to a
temporary directory. What a part cannot do on a device is in there with the reason. A machine with
nothing but PyTorch needs the wheels that benchmarks/gpu/wheels.txt lists.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.activations.models import Shape
from benchmarks.gpu import contenders as who
from benchmarks.gpu import contests, device, predictions, programs, traces
from benchmarks.gpu.contenders import Job
from benchmarks.gpu.contests import Contest, Found
from benchmarks.gpu.correctness import MODELS
from benchmarks.gpu.worker import Worker
from benchmarks.io.results import Result, Skipped, markdown_table, table
from benchmarks.machine import say, tidy_up_when_ended
from benchmarks.turns import Deadline

#: What is done and its share of the time, the most valuable first; what one leaves, others have.
SHARES = {
    "tests": 0.15, "bits": 0.08, "trace": 0.1, "rates": 0.04, "activations": 0.2, "large": 0.14,
    "optimizer": 0.2, "sanitizers": 0.09, "predictions": 0.0,
}  # fmt: skip
#: Goals for a saved tensor, in microseconds of the threads that train.
_GOALS = {traces.MOVED: 20.0, traces.KEPT_SMALL: 3.0, traces.KEPT_BUDGET: 3.0}
#: Whose steady steps are looked at: activations of a GPT that saves about a gigabyte in a step, so
#: that a slow disk can take them as well.
_STEADY = {
    "activations": (
        Job(Shape(2048, 4, 16, 1024, dtype="bfloat16"), 4),
        (who.PLAIN, who.TO_HOST, who.TO_DISK, who.TRL),
    ),
    "states": (contests.OPTIMIZER.job, (who.PLAIN, who.STATES_HOST, who.STATES_DEVICE)),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What every part is given: options, the process with the device, and what was found so far."""

    options: argparse.Namespace
    worker: Worker
    parts: dict[str, Any]

    @property
    def judged(self) -> bool:
        """Whether speed and memory mean something here."""
        return not (self.options.quick or self.options.device == device.SIMULATED)

    def race(self, chosen: list[Contest], seconds: float) -> Found:
        """Contests in the size of this run, and those that were asked for."""
        chosen = self._asked_for(chosen)
        if self.options.brief:
            chosen = [replace(contest, names=contest.names[:2]) for contest in chosen[:1]]
        steps = 2 if self.options.brief else 4 if self.options.quick else 20
        return contests.run(chosen, self.worker, seconds, steps=steps, judged=self.judged)

    def _asked_for(self, chosen: list[Contest]) -> list[Contest]:
        def has_part(name: str) -> bool:
            words = self.options.contenders
            return name == who.PLAIN or any(word in name for word in words)

        return [
            replace(contest, names=list(filter(has_part, contest.names)))
            for contest in chosen
            if any(word in contest.title for word in self.options.contests)
        ]


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    options = _options()
    if options.device is None:
        print(device.NEEDS, file=sys.stderr)
        return 2
    tidy_up_when_ended()
    deadline = Deadline(60 * options.minutes)
    with Worker(options.device, options.dir) as worker:
        machine = worker.machine | {"quick": options.quick}
        print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
        file = options.json or _default_file(machine)
        run = Run(options, worker, _earlier(file, machine))
        results, texts = [], {}
        shares = {name: SHARES[name] for name in options.only}
        for name in options.only:
            whole = sum(shares.values()) or 1.0
            found = _run_part(name, run, deadline.left * shares.pop(name) / whole)
            results += found.claims
            texts |= found.texts
            file.parent.mkdir(parents=True, exist_ok=True)
            content = {"simulated": machine["simulated"], "machine": machine, "parts": run.parts}
            file.write_text(json.dumps(content, indent=1) + "\n")
    for title, text in texts.items():
        print(f"\n## {title}\n\n{text}")
    print(f"\n{table(results)}\n\nwritten to {file}")
    failed = any(run.parts[name]["status"] == "failed" for name in options.only)
    return int(failed or any(result.judged and not result.held for result in results))


def _options() -> argparse.Namespace:
    found = torch.accelerator.current_accelerator(check_available=True)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="for all of it")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk")
    add("--json", type=Path, help="file of results (default: see above)")
    add("--only", nargs="+", choices=SHARES, default=list(SHARES))
    add("--quick", action="store_true", help="tiny models; figures mean little")
    add("--brief", action="store_true", help="quick, and one of everything")
    add("--contests", nargs="+", default=[""], help="only those with a word of these in the title")
    add("--contenders", nargs="+", default=[""], help="likewise, beside plain training")
    add("--tests", nargs="+", default=programs.TESTS, help="files and folders of the first part")
    add("--device", default=None if found is None else found.type, help="type, or sim")
    options = parser.parse_args()
    options.quick = options.quick or options.brief
    options.only = [name for name in SHARES if name in options.only]
    return options


def _default_file(machine: Mapping[str, Any]) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-") + ".json"
    if machine["simulated"] or machine["quick"]:
        return Path(tempfile.gettempdir()) / "offload-strategy-gpu" / name
    return device.ROOT / "docs" / "results" / "gpu" / name


def _earlier(file: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Parts that an earlier run on the same device, of the same size, has left in the file."""
    try:
        content = json.loads(file.read_text())
        before = content["machine"]
        same = all(before[name] == machine[name] for name in ("device", "quick", "torch"))
        return dict(content["parts"]) if same else {}
    except (OSError, ValueError, KeyError):
        return {}


def _run_part(name: str, run: Run, seconds: float) -> Found:
    begin, found = time.monotonic(), Found()
    status, reason = "ran", None
    say(f"{name}: {seconds:.0f} s")
    try:
        if seconds < 1 and SHARES[name]:
            raise Skipped("no time was left for it")
        found = _PARTS[name](run, seconds)
    except Skipped as why:
        status, reason = "cannot run", str(why)
    except Exception as error:  # the other parts are of interest all the same
        traceback.print_exc()
        status, reason = "failed", f"{type(error).__name__}: {error}"[-2000:]
    if reason is not None:
        found.texts[name] = f"{status}: {reason}"
    run.parts[name] = {
        "status": status, "reason": reason, "commit": run.worker.machine["commit"],
        "seconds": time.monotonic() - begin, "seconds_given": seconds,
        "claims": [result.as_dict() for result in found.claims], "figures": found.figures,
    }  # fmt: skip
    return found


# ---------------------------------------------------------------------- the parts
def _tests(run: Run, seconds: float) -> Found:
    run.worker.rest()
    return programs.accelerator_tests(run.options.device, seconds, run.options.tests)


def _bits(run: Run, seconds: float) -> Found:
    models = list(MODELS)[: 1 if run.options.brief else None]
    found = Found(run.worker.do("correctness.compare", {"models": models}, seconds))
    lines = found.figures["comparisons"]
    judged = [line for line in lines if line["repeats"]]
    same = sum(line["same"] for line in judged)
    share = same / len(judged) if judged else 0.0
    told = "bits of plain training"
    found.claims.append(Result(told, same, len(judged), "trainings", share, 1.0))
    header = ("model", "setting", "repeats", "same", "differs")
    found.texts["Bits"] = markdown_table(header, ([line[one] for one in header] for line in lines))
    found.figures["not_run"] = sorted(set(models) - {line["model"] for line in lines})
    return found


def _trace(run: Run, seconds: float) -> Found:
    """Steady steps with activations and with states away, beside plain ones; then the hooks."""
    deadline, found, rows = Deadline(seconds), Found(), []
    for what, (job, names) in _STEADY.items():
        job = job.tiny() if run.options.quick else job
        found.figures[what], usual = {}, None
        for name in names[: 2 if run.options.brief else None]:
            request, told = {"contender": name, "job": asdict(job)}, f"{what}: {name}"
            try:
                one = run.worker.do("traces.steady", request, deadline.left / 2)
            except (Skipped, RuntimeError) as why:
                one = {"reason": str(why).strip().splitlines()[-1]}
                rows.append((told, one["reason"], "", ""))
            found.figures[what][name] = one
            if "reason" in one:
                continue
            waits, pinned = sum(one["waits"].values()), sum(one["registrations"].values())
            rows.append((told, waits / one["steps"], pinned / one["steps"], one["overlap"]))
            if name == who.PLAIN:
                usual = waits
            elif name in who.OURS and usual is not None:
                # With commit one comparison of all gradients with those that updates took.
                most = usual + (one["steps"] if what == "states" else 0)
                for calls, value, limit in (("waits", waits, most), ("registrations", pinned, 0)):
                    claim = f"steady steps, {told}: {calls}"
                    found.claims.append(
                        Result(claim, value, limit, "calls", value, limit, at_least=False)
                    )
    header = ("", "waits in a step", "registrations", "share of copies beside kernels")
    found.texts["Steady steps"] = markdown_table(header, rows)
    size = {"tensors": 32 if run.options.quick else 256, "nbytes": 1 << 14}
    hooks = found.figures["hooks"] = run.worker.do("traces.hooks", size, max(5.0, deadline.left))
    cells = []
    for name, row in hooks["rows"].items():
        added = row.get("added", dict.fromkeys(traces.FIGURES, row.get("reason")))
        cells.append((name, *added.values()))
        for way in ("pack", "unpack") if name in _GOALS else ():
            value, goal, told = added[f"{way}, cpu"], _GOALS[name], f"a saved tensor: {name}: {way}"
            found.claims.append(
                Result(told, value, goal, "µs", value / goal, 1, at_least=False, judged=run.judged)
            )
    title = "Microseconds of a saved tensor in the threads that train, beside plain"
    found.texts[title] = markdown_table(("", *traces.FIGURES), cells)
    return found


def _rates(run: Run, seconds: float) -> Found:
    rates = run.worker.do("training.rates", {"quick": run.options.quick}, seconds)
    rows = [(name, rate) for name, rate in rates.items() if name != "operations"]
    rows += rates["operations"].items()
    return Found(rates, {"What the machine can do in a second": markdown_table(("", ""), rows)})


def _activations(run: Run, seconds: float) -> Found:
    chosen = list(contests.ACTIVATIONS)
    if run.options.quick:
        chosen = [replace(one, job=one.job.tiny(64 + 32 * n)) for n, one in enumerate(chosen)]
    return run.race(chosen, seconds)


def _large(run: Run, seconds: float) -> Found:
    # Large enough that its limit leaves room for windows of copies, which are not scaled down.
    job = contests.LARGE.job.tiny(256, 6) if run.options.quick else contests.LARGE.job
    contest = replace(contests.LARGE, job=job)
    found = run.race([contest], seconds)
    if rates := run.parts.get("rates", {}).get("figures"):
        predictions.roofline(found, contest, rates)
    return found


def _optimizer(run: Run, seconds: float) -> Found:
    job = contests.OPTIMIZER.job
    job = job.tiny() if run.options.quick else job
    return run.race([replace(contests.OPTIMIZER, job=job)], seconds)


def _sanitizers(run: Run, seconds: float) -> Found:
    run.worker.rest()
    seeds = 1 if run.options.brief else 3
    return programs.sanitizers(run.options.device, run.options.dir, seconds, seeds=seeds)


_PARTS: dict[str, Callable[[Run, float], Found]] = {
    "tests": _tests,
    "bits": _bits,
    "trace": _trace,
    "rates": _rates,
    "activations": _activations,
    "large": _large,
    "optimizer": _optimizer,
    "sanitizers": _sanitizers,
    "predictions": lambda run, seconds: predictions.compare(run.parts),
}


if __name__ == "__main__":
    sys.exit(main())
