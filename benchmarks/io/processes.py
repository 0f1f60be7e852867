"""Four processes that share a path: the path lock keeps the sum and shortens each read."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks import disks
from benchmarks.io.contender import Contender
from benchmarks.io.results import Context, Result, alternating, median_ratio
from benchmarks.io.tuned_peers import TICKET_BYTES, scratch
from offload_strategy.units import MiB

_PROCESSES = 4
_THROTTLE = 300_000_000
#: Tickets of each process.
_TICKETS = 3
_ALONE, _UNLOCKED, _LOCKED = "alone", "without lock", "with path lock"


def processes(context: Context) -> list[Result]:
    """Each process reads its 64 MiB tickets one after the other, with and without the path lock.

    The service time of a read begins with its first block, after its process acquired the lock; the
    time with the wait begins when the read is requested. Both are means over the reads of a round:
    without a lock some reads are served at the expense of others, which a median would hide. Only
    reads during which all four processes were busy count: otherwise the fastest process would
    finish first and leave the others a disk with fewer competitors.
    """
    results = _on_path(context, "bare disk", scratch(context, "processes"), judged=False)
    why_not = disks.why_not()
    if why_not is not None:
        context.say(f"processes on a throttled path are left out: {why_not}")
        return results
    room = 6 * _PROCESSES * _TICKETS * TICKET_BYTES + 1024 * MiB
    with (
        disks.loop_disk(context.directory, room) as disk,
        disks.throttle() as limits,
        limits.entered(),
    ):
        results += _on_path(
            context,
            f"{_THROTTLE // 10**6} MB/s",
            disk.directory,
            judged=True,
            # They set up at full speed.
            ready=lambda: limits.limit(disk, read=_THROTTLE, write=_THROTTLE),
        )
    return results


def _on_path(
    context: Context,
    where: str,
    directory: Path,
    *,
    judged: bool,
    ready: Callable[[], None] = lambda: None,
) -> list[Result]:
    # So that each of the four gets about ten tickets, on the throttled path and on the bare one.
    seconds = (9.0 if judged else 1.0) / (3 if context.quick else 1)
    sums: dict[str, list[float]] = {kind: [] for kind in (_ALONE, _UNLOCKED, _LOCKED)}
    service: dict[str, list[float]] = {kind: [] for kind in sums}
    waited: dict[str, list[float]] = {kind: [] for kind in sums}
    for kind in (_UNLOCKED, _LOCKED):
        (directory / kind.replace(" ", "-")).mkdir(mode=0o700)
    with ExitStack() as undo:
        groups = {
            kind: [
                undo.enter_context(
                    Contender(
                        "ours",
                        directory=str(directory / kind.replace(" ", "-")),
                        count=_TICKETS,
                        nbytes=TICKET_BYTES,
                        ahead=1,
                        with_path_lock=kind == _LOCKED,
                    )
                )
                for _ in range(_PROCESSES)
            ]
            for kind in (_UNLOCKED, _LOCKED)
        }
        # One process without a lock, for as many bytes as the four.
        groups = {_ALONE: groups[_UNLOCKED][:1], **groups}
        ready()
        for group in (groups[_UNLOCKED], groups[_LOCKED]):
            for contender in group:
                contender.ask("write")
        for number in range(context.repeats):
            context.say(f"processes, {where}, round {number + 1} of {context.repeats}")
            for kind in alternating(list(groups), number):
                moves, among_all = _read_together(groups[kind], seconds)
                took = max(m[2] for m in moves) - min(m[0] for m in moves)
                sums[kind].append(len(moves) * TICKET_BYTES / took)
                service[kind].append(statistics.fmean(end - start for _, start, end in among_all))
                waited[kind].append(statistics.fmean(end - queued for queued, _, end in among_all))

    command = f"{_PROCESSES} processes without a lock, `get` of one 64 MiB ticket after another"
    return [
        Result(
            name=f"processes: sum of {_PROCESSES}, {where}",
            ours=statistics.median(sums[_LOCKED]) / 1e6,
            peer=statistics.median(sums[_ALONE]) / 1e6,
            unit="MB/s",
            ratio=median_ratio(sums[_LOCKED], sums[_ALONE]),
            threshold=0.97,
            command="one process alone, for as long",
            details={"bytes_per_second": sums},
            judged=judged,
        ),
        *(
            Result(
                name=f"processes: {name}, {where}",
                ours=1e3 * statistics.median(seconds[_LOCKED]),
                peer=1e3 * statistics.median(seconds[_UNLOCKED]),
                unit="ms",
                ratio=median_ratio(seconds[_LOCKED], seconds[_UNLOCKED]),
                threshold=threshold,
                at_least=False,
                command=command,
                details={"mean_seconds": seconds},
                judged=judged,
            )
            for name, seconds, threshold in (
                ("service of a 64 MiB read", service, 0.4),
                ("with the wait", waited, 1.05),
            )
        ),
    ]


_Moves = list[tuple[float, float, float]]


def _read_together(group: list[Contender], seconds: float) -> tuple[_Moves, _Moves]:
    """Let all read at once; times are of the clock that all processes share.

    Returns:
        When each move was queued, begun and done: of all moves, and of those that ended before the
        first process finished.
    """
    for contender in group:
        contender.tell("read_one_by_one", seconds=seconds)
    each = [[tuple(move) for move in contender.answer()["moves"]] for contender in group]
    moves = [move for one in each for move in one]
    longest = max(end - queued for queued, _, end in moves)
    first_through = min(one[-1][2] for one in each)
    # By when they were queued, not by when they ended: that would leave out the slow ones.
    return moves, [move for move in moves if move[0] <= first_through - longest]
