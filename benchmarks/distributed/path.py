"""Ranks that train data-parallel on one path get, in sum, the bandwidth of one rank alone."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import disks
from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Result, Skipped, alternating, median_ratio
from offload_strategy.units import MiB

_RANKS = 4
_THROTTLE = 100_000_000
_ALONE, _TOGETHER = "one rank", f"{_RANKS} ranks"
_BOTH = "read and write"

Laps = dict[str, list[dict[str, Any]]]


def path(context: Context) -> list[Result]:
    """One rank and four, in turns: the same model, the same states, which the four share.

    The bandwidth is what all ranks moved from the end of the first step to the end of the last,
    over that time: the path is at work before it and after it as well, as in the middle of a long
    training. There is little to compute, and too little memory for what a step writes, so the path
    is what limits the steps.

    Raises:
        Skipped: no throttled disk can be had here.
    """
    why_not = disks.why_not()
    if why_not is not None:
        raise Skipped(why_not)
    # Less than this would stay in buffers.
    width, layers, steps = 2048, 4, 3 if context.quick else 5
    # States, and where updates run ahead as much again, and weights; and something to spare.
    capacity = 2 * width * width * layers * 4 * 5 + 256 * MiB
    laps: dict[str, Laps] = {
        limited: {_ALONE: [], _TOGETHER: []} for limited in ("read", "write", _BOTH)
    }
    with (
        disks.loop_disk(context.directory, 2 * capacity + 1024 * MiB) as disk,
        disks.throttle() as limits,
        limits.entered(),
        ExitStack() as undo,
    ):
        groups = {
            name: _ranks(
                context,
                undo,
                size,
                # Of their own: those who are not at work are no others on the path.
                directory=disk.directory / name.replace(" ", "-"),
                width=width,
                layers=layers,
                capacity=capacity,
            )
            for name, size in ((_ALONE, 1), (_TOGETHER, _RANKS))
        }
        for group in groups.values():
            _all(group, "start")
        for number in range(context.repeats):
            for limited, found in laps.items():
                context.say(f"path, {limited} limited, round {number + 1} of {context.repeats}")
                limits.limit(
                    disk,
                    read=_THROTTLE if "read" in limited else 0,
                    write=_THROTTLE if "write" in limited else 0,
                )
                for name in alternating(list(groups), number):
                    before = _device_bytes(disk.device)
                    answers = _all(groups[name], "train", steps=steps)
                    lap = _lap(answers, steps, limited)
                    lap["device_bytes"] = _device_bytes(disk.device) - before
                    found[name].append(lap)
    return [result for limited, found in laps.items() for result in _results(limited, found)]


def _ranks(
    context: Context, undo: ExitStack, size: int, *, directory: Path, **settings: int
) -> list[Contender]:
    directory.mkdir(mode=0o700)
    store = context.directory / f"store-{size}"
    return [
        undo.enter_context(
            Contender(
                "data_parallel",
                rank=rank,
                size=size,
                store=str(store),
                directory=str(directory),
                **settings,
            )
        )
        for rank in range(size)
    ]


def _results(limited: str, laps: Laps) -> list[Result]:
    of_four, of_one = ([lap["step_seconds"] for lap in laps[n]] for n in (_TOGETHER, _ALONE))
    where = f"{limited} at most {_THROTTLE // 10**6} MB/s{' each' if limited == _BOTH else ''}"
    peer = "one rank alone, the same model"
    together, alone = ([lap["bytes_per_second"] for lap in laps[n]] for n in (_TOGETHER, _ALONE))
    bandwidth = Result(
        name=f"path: {_RANKS} ranks, {where}",
        ours=statistics.median(together) / 1e6,
        peer=statistics.median(alone) / 1e6,
        unit="MB/s",
        ratio=median_ratio(together, alone),
        threshold=0.97,
        command=peer,
        details={"laps": laps},
    )
    step = Result(
        name=f"path: a step of {_RANKS} ranks, the same",
        ours=statistics.median(of_four),
        peer=statistics.median(of_one),
        unit="s",
        ratio=median_ratio(of_four, of_one),
        threshold=1.0,
        at_least=False,
        command=peer,
        judged=False,
    )
    return [bandwidth, step]


def _all(group: list[Contender], action: str, **arguments: Any) -> list[dict[str, Any]]:
    for contender in group:
        contender.tell(action, **arguments)
    return [contender.answer() for contender in group]


def _lap(answers: list[dict[str, Any]], steps: int, limited: str) -> dict[str, Any]:
    """What all ranks moved in the directions that were limited, while they trained."""
    each = [[move for move in answer["moves"] if move[0] in limited] for answer in answers]
    begin = min(answer["first_step_over"] for answer in answers)
    end = max(answer["over"] for answer in answers)
    of_ranks = [sum(_within(begin, end, *move[1:]) for move in one) for one in each]
    return {
        "bytes_per_second": sum(of_ranks) / (end - begin),
        "bytes_of_ranks": of_ranks,
        "step_seconds": (end - begin) / (steps - 1),
    }


def _within(begin: float, end: float, nbytes: int, started: float, finished: float) -> float:
    """Bytes of a move that fall into a span of time."""
    seconds = min(end, finished) - max(begin, started)
    return nbytes * max(0.0, seconds) / max(finished - started, 1e-9)


def _device_bytes(device: Path) -> int:
    """What the kernel has counted for a block device, read and written."""
    fields = Path("/sys/block", device.name, "stat").read_text().split()
    return (int(fields[2]) + int(fields[6])) * 512
