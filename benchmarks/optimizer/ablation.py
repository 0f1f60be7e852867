"""The speed-up of each part of the engine, after MLP-Offload's figures 14 and 15.

Two processes train at once on the same throttled disk, as ranks of a node do, each with its own
model and one thread. The baseline has none of the parts; each is then added alone, and all of
them together.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.activations.models import Shape
from benchmarks.disks import LoopDisk, Throttle, loop_disk, throttle, why_not
from benchmarks.io.results import Context, Result, Skipped
from benchmarks.optimizer.contenders import Ours
from benchmarks.optimizer.session import COUNTED, UNCOUNTED, Rows, start
from benchmarks.optimizer.tasks import TINY, RandomTokens
from benchmarks.optimizer.variants import EXACT_BUFFERS, GRADIENTS, MEANING, PATH_LOCK
from benchmarks.turns import Subject, by_turns
from offload_strategy.units import GiB, MiB

_PROCESSES = 2
_FAST, _SLOW = 300_000_000, 150_000_000
#: About 25 million parameters.
_SHAPE = Shape(512, 6, 8, sequence=256, tied=False)
#: A path grows by 1 GiB for every process that uses it.
_FAST_BYTES, _SLOW_BYTES = 24 * GiB, 8 * GiB
_HOST_SHARE = 0.25
_WARM_UP = 1

BASELINE, ALL = "none of them", "all of them"
OVERLAP, REUSE, TWO_PATHS = "overlap", "reuse of what is in memory", "two paths"


@dataclass(frozen=True)
class Parts:
    """Which parts a contender has; see `_MEANING`."""

    overlap: bool = False
    reuse: bool = False
    gradients: bool = False
    buffers: bool = False
    two_paths: bool = False
    turns: bool = False

    def ours(self, fast: Path, slow: Path, pinned: str) -> Ours:
        """The setting of the engine."""
        kept = {GRADIENTS: self.gradients, EXACT_BUFFERS: self.buffers, PATH_LOCK: self.turns}
        return Ours(
            "eager" if self.overlap else "off",
            host_share=_HOST_SHARE if self.reuse else 0.0,
            paths=(str(fast), str(slow)) if self.two_paths else (str(fast),),
            pinned=pinned,
            threads=2,
            without=tuple(name for name, has in kept.items() if not has),
        )


CONTENDERS = {
    BASELINE: Parts(),
    OVERLAP: Parts(overlap=True),
    REUSE: Parts(reuse=True),
    GRADIENTS: Parts(gradients=True),
    EXACT_BUFFERS: Parts(buffers=True),
    TWO_PATHS: Parts(two_paths=True),
    PATH_LOCK: Parts(turns=True),
    ALL: Parts(True, True, True, True, True, True),
}
_MEANING = {
    BASELINE: "update after the backward pass, one path, no host tier, and: "
    + "; ".join(MEANING.values()),
    OVERLAP: "overlap: eager; without it: off",
    REUSE: f"a host tier for {_HOST_SHARE:.0%} of the states; the order alternates where the "
    "update does not overlap, and where it does the same part stays: the hits are the same. "
    "Without it: no host tier, which hits as often as a cache that the fixed order runs through",
    GRADIENTS: "no fp32 gradients on the disk",
    EXACT_BUFFERS: "staging buffers of exactly the size that is needed",
    TWO_PATHS: f"a second path of {_SLOW // 10**6} MB/s and one of {_FAST // 10**6} MB/s",
    PATH_LOCK: "one process uses a path at a time",
    ALL: "overlap: eager",
}


def ablation(context: Context, pinned: str) -> tuple[str, list[Result]]:
    """Train with none, each and all of the parts; returns the table, and figures to look at.

    Args:
        context: where, how often, and how quick.
        pinned: bytes of our staging buffers, of each process.
    """
    reason = why_not()
    if reason is not None:
        raise Skipped(reason)
    with (
        tempfile.TemporaryDirectory(dir=context.directory) as folder,
        loop_disk(Path(folder), _FAST_BYTES) as fast,
        loop_disk(Path(folder), _SLOW_BYTES) as slow,
        throttle() as limits,
    ):
        rows = _train(context, pinned, fast, slow, limits)
    _check_losses(rows)
    return _table(rows), _results(rows)


def _train(
    context: Context, pinned: str, fast: LoopDisk, slow: LoopDisk, limits: Throttle
) -> dict[str, Rows]:
    task = RandomTokens(TINY if context.quick else _SHAPE)
    with limits.entered(), contextlib.ExitStack() as stack:
        groups: dict[str, list[Subject]] = {}
        for name, parts in CONTENDERS.items():
            # Who takes turns on a directory looks for others there: each group has its own.
            first, second = (_place(disk, len(groups)) for disk in (fast, slow))
            options = parts.ours(first, second, pinned).options()
            groups[name] = [
                start(stack, name, options, task, fast.directory, threads=1)[0]
                for _ in range(_PROCESSES)
            ]
        for disk, rate in ((fast, _FAST), (slow, _SLOW)):
            limits.limit(disk, read=rate, write=rate)

        def ask(name: str, number: int) -> dict[str, Any]:
            for subject in groups[name]:
                subject.tell({"steps": UNCOUNTED + COUNTED})
            return _together([subject.answer() for subject in groups[name]])

        laps = by_turns(
            list(groups),
            ask,
            warm_up=_WARM_UP,
            repeats=context.repeats,
            each_round=lambda number: context.say(
                f"ablation, round {number + 1} of {context.repeats}"
            ),
        )
    return {name: Rows.of(name, answers) for name, answers in laps.items()}


def _place(disk: LoopDisk, number: int) -> Path:
    place = disk.directory / f"group-{number}"
    place.mkdir(mode=0o700)
    return place


def _together(laps: list[dict[str, Any]]) -> dict[str, Any]:
    """One lap of several processes: the slowest one's seconds, everybody's bytes and losses."""
    steps = []
    for together in zip(*(lap["steps"] for lap in laps), strict=True):
        step = dict(max(together, key=lambda each: each["seconds"]))
        for key in ("read_bytes", "written_bytes", "peak_bytes", "pool_peak_bytes"):
            step[key] = sum(each[key] for each in together)
        step["loss"] = " ".join(each["loss"] for each in together)
        steps.append(step)
    return {"steps": steps}


def _check_losses(rows: Mapping[str, Rows]) -> None:
    odd = [name for name, row in rows.items() if row.losses != rows[BASELINE].losses]
    if odd:
        raise RuntimeError(f"ablation: losses of {odd} differ from those of the baseline")


def _table(rows: Mapping[str, Rows]) -> str:
    baseline = rows[BASELINE]
    lines = [
        f"{_PROCESSES} processes at once, one path of {_FAST // 10**6} MB/s in each direction "
        "unless said otherwise; seconds of the slower process, bytes and memory of both; losses "
        "are the same to the last bit",
        "",
        "| with | iteration, s | times as fast | backward, s | end of backward to end of step, s "
        "| read, MB | written, MB | peak, MiB | of it staging buffers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.median('seconds'):.3f} | {baseline.ratio(row, 'seconds'):.2f} "
            f"| {row.median('backward_seconds'):.3f} | {row.median('step_seconds'):.3f} "
            f"| {row.median('read_bytes') / 1e6:.0f} | {row.median('written_bytes') / 1e6:.0f} "
            f"| {row.median('peak_bytes') / MiB:.0f} | {row.median('pool_peak_bytes') / MiB:.0f} |"
        )
    lines += ["", *(f"- {name}: {meaning}" for name, meaning in _MEANING.items())]
    return "\n".join(lines)


def _results(rows: Mapping[str, Rows]) -> list[Result]:
    baseline = rows[BASELINE]
    return [
        Result(
            f"ablation: {name}",
            statistics.median(row.values("seconds")), baseline.median("seconds"), "s",
            baseline.ratio(row, "seconds"), 1.0, judged=False,
        )
        for name, row in rows.items()
        if name != BASELINE
    ]  # fmt: skip
