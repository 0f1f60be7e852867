"""Optimizer states on a disk, compared with plain PyTorch and DeepSpeed; clipping; ablation.

    python -m benchmarks.optimizer --dir /mnt/nvme0                everything
    python -m benchmarks.optimizer --lines table --models 70M      the table of one model
    python -m benchmarks.optimizer --quick                         tiny: to see that it runs

Every contender trains in its own process; they alternate, a few steps at a time. The exit
status is 1 if a claim does not hold. Lines:

    table       plain, DeepSpeed ZeRO-3 with the optimizer on NVMe, and ours in several settings
    clipping    gradients clipped never, now and then, and nearly always
    ablation    what each part of the engine is worth (root: throttled loop devices)
    prediction  Fuyou's equations against the table's seconds
    contest     everybody who can train it here: DeepSpeed, recompute, files, our presets
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.allocators import Allocator
from benchmarks.io.results import Context, Result, Skipped, table, write_json
from benchmarks.machine import describe_machine, say, tidy_up_when_ended
from benchmarks.optimizer.ablation import ablation
from benchmarks.optimizer.claims import rooflines
from benchmarks.optimizer.clipping import clipping
from benchmarks.optimizer.contender_sets import MEANING, Choice
from benchmarks.optimizer.contenders import Ours
from benchmarks.optimizer.deepspeed_peer import Settings
from benchmarks.optimizer.prediction import prediction
from benchmarks.optimizer.session import COUNTED, UNCOUNTED, Outcome
from benchmarks.optimizer.table import contest, table_of
from benchmarks.optimizer.tasks import SHAPES

_LINES = ("table", "clipping", "ablation", "prediction", "contest")


def main() -> int:
    """Parse the options, run, print and write the outcome."""
    options = _options()
    tidy_up_when_ended()
    machine = {**describe_machine(options.dir), "allocator": Allocator.best()}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)
    repeats = options.repeats or (1 if options.quick else 5)
    choice = Choice(
        models=options.models[:1] if options.quick else options.models,
        contenders=options.contenders,
        pinned=options.pinned,
        budget=options.budget,
        deepspeed=None if options.deepspeed is None else Settings(**json.loads(options.deepspeed)),
    )
    pinned = choice.pinned or Ours.pinned
    results: list[Result] = []
    texts: dict[str, str] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="benchmarks-optimizer-", dir=options.dir) as folder:
        context = Context(Path(folder), repeats, options.quick, say)
        lines: dict[str, Callable[[], tuple[str, list[Result]]]] = {
            "table": lambda: table_of(context, choice),
            "contest": lambda: contest(context, choice),
            "clipping": lambda: clipping(
                context, pinned, 10 if options.quick else options.clipping_steps
            ),
            "ablation": lambda: ablation(context, pinned),
            "prediction": lambda: prediction(context, choice),
        }
        for name in options.lines:
            say(name)
            try:
                texts[name], found = lines[name]()
            except Skipped as why:
                skipped[name] = str(why)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
            else:
                results += found
                say(f"\n{texts[name]}\n\n{table(found)}")
    skipped |= choice.left_out
    for key, held in context.shared.items():
        if isinstance(held, Outcome):
            skipped |= {f"{key}: {name}": why for name, why in held.skipped.items()}
    print(f"\nmedians of {repeats} laps of {COUNTED} steps, each after {UNCOUNTED} more")
    print(f"ours: activations.budget {choice.budget}; clipping, ablation: memory.pinned {pinned}\n")
    meanings = [f"{name}: {choice.meaning(name)}" for name in MEANING if name in choice.contenders]
    print("\n".join(meanings))
    for name, text in texts.items():
        print(f"\n## {name}\n\n{text}")
    print("\n" + table(results))
    for title, reasons in (("skipped", skipped), ("failed", failed)):
        for name, reason in reasons.items():
            print(f"{title}: {name}: {reason}")
    if options.json is not None:
        outcome: dict[str, object] = {
            "repeats": repeats,
            "quick": options.quick,
            "deepspeed_settings_tried": choice.searched,
            "texts": texts,
            "sessions": {
                key: held.as_dict()
                for key, held in context.shared.items()
                if isinstance(held, Outcome)
            },
            "results": [result.as_dict() for result in results],
            "roofline": [
                row
                for key, held in context.shared.items()
                if isinstance(held, Outcome)
                for row in rooflines(key, held)
            ],
            "skipped": skipped,
            "failed": failed,
        }
        write_json(options.json, machine, outcome)
    return int(bool(failed) or any(result.judged and not result.held for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--lines", nargs="+", choices=_LINES, default=_LINES)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=MEANING,
        default=list(MEANING),
        metavar="NAME",
        help=f"of the table: {', '.join(repr(name) for name in MEANING)}",
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, help="laps of each that count (5; with --quick 1)")
    parser.add_argument("--pinned", help="our memory.pinned, in all")
    parser.add_argument("--budget", default=Choice.budget, help="our activations.budget")
    parser.add_argument(
        "--deepspeed",
        metavar="JSON",
        help='its settings, such as \'{"sub_group_size": 20000000, "aio": {"queue_depth": 32}}\'; '
        "searched for if not given",
    )
    parser.add_argument("--clipping-steps", type=int, default=120, help="of each, that count")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    parser.add_argument("--quick", action="store_true", help="tiny models; figures mean little")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
