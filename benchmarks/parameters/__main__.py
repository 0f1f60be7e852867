"""Models that are larger than memory: trained and loaded.

    python -m benchmarks.parameters --dir /mnt/nvme0        everything
    python -m benchmarks.parameters --lines train           a GPT of several times its memory
    python -m benchmarks.parameters --quick                 tiny: to see that it runs

Every run is its own process. The exit status is 1 if a claim does not hold, and 2 if nothing
could run. Lines:

    train     in a memory group (root): plain PyTorch, which is killed, and everything streamed
    largest   the largest model that trains there (root), relative to plain PyTorch and DeepSpeed
    load      a checkpoint loaded to the tiers, or left in its files: seconds, and peak of memory
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from benchmarks.io.results import Result, Skipped, conclude
from benchmarks.machine import describe_machine, say, tidy_up_when_ended
from benchmarks.parameters.job import Job
from benchmarks.parameters.largest import CONTENDERS, Bounds, largest
from benchmarks.parameters.loading import loading
from benchmarks.parameters.loading_subject import LoadJob
from benchmarks.parameters.training import training
from offload_strategy.units import parse_size

_LINES = ("train", "largest", "load")
_QUICK = {
    "limit": "1GiB",
    "width": 256,
    "vocabulary": 1024,
    "layers": 4,
    "load_layers": 4,
    "most_layers": 4,
    "steps": 3,
    "minutes": 2.0,
    "pinned": "64MiB",
}


def main(arguments: list[str] | None = None) -> int:
    """Parse the options, run, print and write the outcome."""
    options = _options(arguments)
    tidy_up_when_ended()
    machine = describe_machine(options.dir)
    print(json.dumps(machine), flush=True)
    job = Job(
        options.width,
        options.layers,
        vocabulary=options.vocabulary,
        sequence=options.sequence,
        batch=options.batch,
        steps=options.steps,
        overlap=options.overlap,
        pinned=options.pinned,
        ranks=options.ranks,
    )
    limit = parse_size(options.limit)
    lines: dict[str, Callable[[], list[Result]]] = {
        "train": lambda: training(job, options.dir, limit, _tell, plain=not options.no_plain),
        "largest": lambda: largest(
            job,
            options.dir,
            Bounds(limit, options.from_layers, options.most_layers, options.minutes),
            _tell,
            options.contenders,
        ),
        "load": lambda: loading(
            LoadJob(**{**asdict(job), "layers": options.load_layers}),
            options.dir,
            options.rounds,
            _tell,
        ),
    }
    results: list[Result] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in options.lines:
        say(name)
        try:
            results += lines[name]()
        except Skipped as why:
            skipped[name] = str(why)
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
    outcome = {"quick": options.quick, "job": asdict(job), "skipped": skipped, "failed": failed}
    status = conclude(results, options.json, machine, outcome)
    for title, reasons in (("skipped", skipped), ("failed", failed)):
        for name, reason in reasons.items():
            print(f"{title}: {name}: {reason}")
    if failed:
        return 1
    return status if results else 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parameters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lines", nargs="+", choices=_LINES, default=_LINES)
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="on the disk")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    parser.add_argument("--limit", default="4GiB", help="of the memory group")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--overlap", default="eager", choices=("eager", "commit", "off"))
    parser.add_argument("--pinned", default="1GiB", help="memory.pinned")
    parser.add_argument("--layers", type=int, default=26, help="train: of the model")
    parser.add_argument("--steps", type=int, default=10, help="train: how many")
    parser.add_argument(
        "--ranks", type=int, default=1, help="train: processes that shard the model (FSDP2)"
    )
    parser.add_argument("--no-plain", action="store_true", help="train: leave plain PyTorch out")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=list(CONTENDERS),
        help="largest: who tries",
    )
    parser.add_argument(
        "--from-layers", type=int, default=1, help="largest: where the doubling begins"
    )
    parser.add_argument("--most-layers", type=int, default=4096, help="largest: where it ends")
    parser.add_argument("--minutes", type=float, default=12.0, help="largest: of a run at most")
    parser.add_argument("--load-layers", type=int, default=26, help="load: of the model")
    parser.add_argument("--rounds", type=int, default=3, help="load: how many")
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**_QUICK)
    return parser.parse_args(arguments)


def _tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
