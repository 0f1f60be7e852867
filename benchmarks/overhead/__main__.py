"""A profile of the overhead of a step: what the processors do that plain PyTorch does not.

    python -m benchmarks.overhead                   320M parameters, five rounds
    python -m benchmarks.overhead --model 70M --repeats 3
    python -m benchmarks.overhead --write docs/performance.md   puts the table into the page

Contenders train alternately, in laps of some steps, each in its own process, which `perf record`
samples meanwhile. A step's time times the number of cores is what the processors did plus what they
were idle; so every line of the table is a part of what a step takes longer. Exit status 1: nothing
could be sampled, or a loss differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.allocators import Allocator
from benchmarks.machine import commit, cores, describe_machine, say, tidy_up_when_ended
from benchmarks.optimizer.contenders import PLAIN, Ours, plain_options
from benchmarks.optimizer.session import WARM_UP, Rows, start
from benchmarks.optimizer.tasks import SHAPES, TINY, RandomTokens
from benchmarks.overhead.samples import KINDS, Recording, Work, why_not
from benchmarks.turns import Subject, by_turns
from offload_strategy.units import MiB, markdown_table

#: Steps of a lap; all are sampled.
_STEPS = 3
_ROOT = Path(__file__).resolve().parents[2]
_OURS = {
    "off": Ours("off"),
    "eager": Ours("eager"),
    "eager, activations": Ours("eager", activations=True),
    "eager, half on the host": Ours("eager", host_share=0.5),
    "commit": Ours("commit"),
    "commit, activations": Ours("commit", activations=True),
}
_BEGIN, _END = "<!-- overhead: begin -->", "<!-- overhead: end -->"


def main() -> int:
    """Run the contenders in turns, print the table, and write it into the page if asked for."""
    options = _options()
    tidy_up_when_ended()
    if (reason := why_not()) is not None:
        say(f"nothing can be sampled: {reason}")
        return 1
    machine = describe_machine(options.dir)
    with tempfile.TemporaryDirectory(prefix="benchmarks-overhead-", dir=options.dir) as folder:
        laps = _train(options, Path(folder))
    same = len(
        {Rows.of(name, [x["answer"] for x in each], 0).losses for name, each in laps.items()}
    )
    figures = {name: [_per_step(lap) for lap in each] for name, each in laps.items()}
    text = _table(figures)
    about = (
        f"{options.model} parameters in fp32, AdamW, 2 × 256 tokens, {cores()} cores, "
        f"{machine['kernel']}, torch {machine['torch']}; medians of {options.repeats} laps of "
        f"{_STEPS} steps, sampled all the time; {options.allocator}"
    )
    print(f"{about}\n\n{text}")
    if options.write is not None:
        page = options.write.read_text()
        before, _, rest = page.partition(_BEGIN)
        after = rest.partition(_END)[2]
        options.write.write_text(f"{before}{_BEGIN}\n{about}:\n\n{text}\n{_END}{after}")
    if options.json is not None:
        found = {"machine": machine, "commit": commit(_ROOT), "about": about, "laps": figures}
        options.json.write_text(json.dumps(found, indent=1))
    if same != 1:
        say("losses differ")
    return int(same != 1)


def _train(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    task = RandomTokens(TINY if options.model == "tiny" else SHAPES[options.model])
    subjects: dict[str, Subject] = {}
    with contextlib.ExitStack() as stack:
        names = [PLAIN, *options.contenders]
        for name in names:
            told = plain_options() if name == PLAIN else _OURS[name].options()
            subjects[name], _ = start(
                stack, name, told, task, folder, allocator=Allocator(options.allocator)
            )

        def ask(name: str, number: int) -> dict[str, Any]:
            subject = subjects[name]
            subject.tell({"steps": _STEPS})
            recording = Recording(subject.pid, folder / "perf.data")
            answer = subject.answer()
            return {"answer": answer, "work": recording.end()}

        return by_turns(
            names, ask, warm_up=WARM_UP, repeats=options.repeats,
            each_round=lambda number: say(f"round {number + 1} of {options.repeats}"),
        )  # fmt: skip


def _per_step(lap: dict[str, Any]) -> dict[str, float]:
    """What a lap took per step: seconds, and seconds of the cores by kind of work."""
    work: Work = lap["work"]
    seconds = statistics.fmean(step["seconds"] for step in lap["answer"]["steps"])
    figures = {kind: work.of(kind) / _STEPS for kind in KINDS}
    figures["idle"] = cores() * seconds - work.total / _STEPS
    figures["all cores"] = cores() * seconds
    figures["threads that train"] = work.training / _STEPS
    figures["a step"] = seconds
    figures["peak, MiB"] = max(step["peak_bytes"] for step in lap["answer"]["steps"]) / MiB
    return figures


def _table(figures: dict[str, list[dict[str, float]]]) -> str:
    medians = {}
    for name, rows in figures.items():
        medians[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    plain = medians[PLAIN]
    lines = []
    for key in plain:
        if key == "peak, MiB":
            lines.append((key, *(f"{found[key]:,.0f}" for found in medians.values())))
        elif key == "a step":
            ratios = [
                f"{found[key]:.2f} ({found[key] / plain[key]:.2f})" for found in medians.values()
            ]
            lines.append((key, *ratios))
        else:
            more = [f"{medians[name][key] - plain[key]:+.2f}" for name in medians if name != PLAIN]
            lines.append((key, f"{plain[key]:.2f}", *more))
    return markdown_table(" | ".join(["seconds of the cores per step", *medians]), lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--model", default="320M", choices=["tiny", *SHAPES])
    parser.add_argument("--dir", type=Path, default=Path("/tmp"), help="on the disk")
    parser.add_argument("--contenders", nargs="*", default=list(_OURS), choices=list(_OURS))
    parser.add_argument("--repeats", type=int, default=5, help="laps that count")
    parser.add_argument(
        "--allocator",
        default=Allocator.AS_IT_COMES,
        choices=[str(each) for each in Allocator],
        help="of every contender",
    )
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
