"""Large transfers, alternating: this package, fio and DeepNVMe, the peers with their best settings.

A peer's best settings are searched for first: each combination once, then the fastest few again,
by their medians, in each direction for itself. Then all contenders alternate with these.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.io import fio
from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Skipped, alternating
from offload_strategy.units import GiB, MiB

DIRECTIONS = ("write", "read")
OURS, FIO, DEEPNVME = "ours", "fio", "DeepNVMe"
TICKET_BYTES = 64 * MiB
#: How many of a peer's settings are measured again after the search.
_FINALISTS = 3

Settings = TypeVar("Settings")


@dataclass
class Contest:
    """What was measured, by contender and direction.

    Args:
        nbytes: moved in each run.
        seconds, cpu_seconds: of each run, one value a round.
        commands: what each peer ran.
        missing: peers that did not take part, and why.
        tried: seconds of every setting that was tried.
    """

    nbytes: int
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_seconds: dict[tuple[str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    commands: dict[tuple[str, str], str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tried: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """Those who took part."""
        return [peer for peer in (FIO, DEEPNVME) if (peer, "read") in self.seconds]


def contest(context: Context) -> Contest:
    """Hold the contest, once for all lines of a run that look at it."""
    if "contest" not in context.shared:
        context.shared["contest"] = _hold(context)
    held: Contest = context.shared["contest"]
    return held


def _hold(context: Context) -> Contest:
    nbytes = 512 * MiB if context.quick else 2 * GiB
    count = nbytes // TICKET_BYTES
    result = Contest(nbytes)
    with ExitStack() as undo:
        runners: dict[str, Callable[[str], dict[str, Any]]] = {}
        ours = undo.enter_context(
            Contender("ours", directory=str(context.directory), count=count, nbytes=TICKET_BYTES)
        )
        runners[OURS] = ours.ask
        makers = {FIO: _fio, DEEPNVME: _deepnvme}
        for peer, make in makers.items():
            try:
                runners[peer] = make(context, result, count, undo)
            except Skipped as why:
                result.missing[peer] = str(why)
                context.say(f"{peer} does not take part: {why}")
        for number in range(context.repeats):
            context.say(f"large transfers, round {number + 1} of {context.repeats}")
            for direction in DIRECTIONS:
                for name in alternating(list(runners), number):
                    figures = runners[name](direction)
                    result.seconds[name, direction].append(figures["seconds"])
                    result.cpu_seconds[name, direction].append(figures["cpu_seconds"])
    return result


def _fio(
    context: Context, result: Contest, count: int, undo: ExitStack
) -> Callable[[str], dict[str, Any]]:
    file = context.directory / "fio"
    nbytes = count * TICKET_BYTES
    undo.callback(file.unlink, missing_ok=True)
    engines = []
    for engine in fio.ENGINES:
        try:  # the first write allocates the file
            fio.run(file, "write", nbytes, fio.FioSettings(engine, 4 * MiB, 8))
            engines.append(engine)
        except Skipped as why:
            context.say(str(why))
    if not engines:
        raise Skipped(f"fio runs with none of {', '.join(fio.ENGINES)}")
    blocks, depths = (
        ((4 * MiB,), (4, 16)) if context.quick else ((MiB, 4 * MiB, 16 * MiB), (4, 16, 32))
    )
    choices = [fio.FioSettings(*choice) for choice in product(engines, blocks, depths)]

    def run(direction: str, settings: fio.FioSettings) -> fio.FioRun:
        return fio.run(file, direction, nbytes, settings)

    def seconds(direction: str, settings: fio.FioSettings) -> float:
        return run(direction, settings).seconds

    best = {}
    for direction in DIRECTIONS:
        context.say(f"fio: searching {len(choices)} settings to {direction}")
        best[direction], tried = fastest(choices, partial(seconds, direction))
        result.tried[f"{FIO} {direction}"] = tried
        result.commands[FIO, direction] = fio.shown(direction, nbytes, best[direction])

    def measured(direction: str) -> dict[str, Any]:
        took = run(direction, best[direction])
        return {"seconds": took.seconds, "cpu_seconds": took.cpu_seconds}

    return measured


def _deepnvme(
    context: Context, result: Contest, count: int, undo: ExitStack
) -> Callable[[str], dict[str, Any]]:
    context.say("DeepNVMe: starting (its first use compiles it, which takes minutes)")
    try:
        peer = undo.enter_context(
            Contender(
                "deepnvme", directory=str(context.directory), count=count, nbytes=TICKET_BYTES
            )
        )
    except RuntimeError as error:  # it died, or never started: told with its own words
        raise Skipped(str(error)) from error
    axes = (
        ((MiB,), (16,), (1, 2)) if context.quick else ((MiB, 4 * MiB, 8 * MiB), (8, 16, 32), (1, 2))
    )
    choices = list(product(*axes))

    def run(direction: str, choice: tuple[int, int, int]) -> dict[str, Any]:
        block, depth, threads = choice
        return peer.ask(direction, block=block, depth=depth, threads=threads)

    def seconds(direction: str, choice: tuple[int, int, int]) -> float:
        return float(run(direction, choice)["seconds"])

    best = {}
    for direction in DIRECTIONS:
        context.say(f"DeepNVMe: searching {len(choices)} settings to {direction}")
        best[direction], tried = fastest(choices, partial(seconds, direction))
        result.tried[f"{DEEPNVME} {direction}"] = tried
        block, depth, threads = best[direction]
        result.commands[DEEPNVME, direction] = (
            f"handle = aio_handle({block}, {depth}, False, True, {threads}); "
            f"handle.async_p{direction}(tensor, FILE, offset) for {count} pinned tensors of "
            f"{TICKET_BYTES // MiB} MiB; handle.wait()"
        )
    return lambda direction: run(direction, best[direction])


def fastest(
    choices: Sequence[Settings], run: Callable[[Settings], float]
) -> tuple[Settings, list[dict[str, Any]]]:
    """The settings with the least seconds, and what was tried."""
    once = {index: [run(choice)] for index, choice in enumerate(choices)}
    finalists = sorted(once, key=lambda index: once[index][0])[:_FINALISTS]
    for _ in range(2):
        for index in finalists:
            once[index].append(run(choices[index]))
    best = min(finalists, key=lambda index: statistics.median(once[index]))
    tried = [{"settings": str(choices[index]), "seconds": once[index]} for index in once]
    return choices[best], tried


def scratch(context: Context, name: str) -> Path:
    """An empty directory of a line's own."""
    place = context.directory / name
    place.mkdir(mode=0o700, exist_ok=True)
    return place
