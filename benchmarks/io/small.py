"""Small writes, one at a time: beside a file per tensor, created and overwritten."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

import torch

from benchmarks.io.contest import scratch
from benchmarks.io.ours import CLIENT, OurHeap
from benchmarks.io.results import Context, Result, in_turns, median_ratio, percentile
from offload_strategy.heap import Ticket
from offload_strategy.units import MiB

_NBYTES = 2 * MiB
_CREATED, _OVERWRITTEN = "a file created per tensor", "existing files overwritten"
_COMMANDS = {
    _CREATED: "fd = os.open(NEW, O_WRONLY|O_CREAT|O_EXCL|O_DIRECT); os.pwrite(fd, tensor, 0); "
    "os.close(fd)",
    _OVERWRITTEN: "fd = os.open(FILE, O_WRONLY|O_DIRECT); os.pwrite(fd, tensor, 0); os.close(fd)",
}
#: So many writes of a kind make a run; then it is the next kind's turn.
_RUN = 25
#: Tickets, and files, that are there at a time: as many places are written by turns.
_KEPT = 8


def small(context: Context) -> list[Result]:
    """Latency of writing 2 MiB: from the call until it is known that the bytes are on the path.

    One after the other, in runs, all kinds in turns, from the same buffer. Where a file system puts a file
    is a matter of luck, and decides whether it takes one request or two: each alternation has
    files, and a space of ours, of its own.
    """
    rounds = 100 if context.quick else 400
    took: dict[str, list[float]] = defaultdict(list)
    moved: list[float] = []
    for alternation in range(context.repeats):
        place = scratch(context, f"small-{alternation}")
        with OurHeap([place]) as heap:
            (buffer,) = heap.buffers(1, _NBYTES)
            kinds = {
                "ours": _ours(heap, buffer),
                _CREATED: _created(str(place), buffer),
                _OVERWRITTEN: _overwritten(str(place), buffer),
            }
            since = 0.0
            for run in range(-1, rounds // _RUN):
                if run == 0:
                    since = time.perf_counter()
                for kind in in_turns(list(kinds), run):
                    seconds = [kinds[kind]() for _ in range(_RUN)]
                    if run >= 0:  # before that every place is written once
                        took[kind] += seconds
            moved += [move.finished_at - move.queued_at for move in heap.moves(since)]
            kinds.clear()
        for file in place.iterdir():
            file.unlink()

    results = []
    for peer, threshold in ((_CREATED, 2.0), (_OVERWRITTEN, 1.0)):
        for name, figure in (("median", statistics.median), ("99th percentile", _p99)):
            ours, theirs = figure(took["ours"]), figure(took[peer])
            median = name == "median"
            results.append(
                Result(
                    name=f"small: {name}, beside {peer}",
                    ours=1e6 * ours,
                    peer=1e6 * theirs,
                    unit="µs",
                    ratio=median_ratio(took[peer], took["ours"]) if median else theirs / ours,
                    threshold=threshold,
                    command=_COMMANDS[peer],
                    details={
                        "writes": len(took["ours"]),
                        "microseconds_of_the_move_alone": 1e6 * figure(moved),
                    },
                    judged=median,
                )
            )
    return results


def _p99(values: list[float]) -> float:
    return percentile(values, 99)


def _ours(heap: OurHeap, buffer: torch.Tensor) -> Callable[[], float]:
    kept: deque[Ticket] = deque()

    def write() -> float:
        begin = time.perf_counter()
        ticket = heap.heap.put(buffer, CLIENT, [heap.tier])
        heap.heap.wait_for_writes()
        took = time.perf_counter() - begin
        kept.append(ticket)
        if len(kept) > _KEPT:
            heap.heap.free(kept.popleft())
        return took

    return write


def _created(place: str, buffer: torch.Tensor) -> Callable[[], float]:
    payload = memoryview(buffer.numpy())  # type: ignore[arg-type]
    numbers = itertools.count()
    kept: deque[str] = deque()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT

    def write() -> float:
        name = f"{place}/created-{next(numbers)}"
        begin = time.perf_counter()
        fd = os.open(name, flags, 0o600)
        written = os.pwrite(fd, payload, 0)
        os.close(fd)
        took = time.perf_counter() - begin
        assert written == len(payload)
        kept.append(name)
        if len(kept) > _KEPT:
            os.unlink(kept.popleft())
        return took

    return write


def _overwritten(place: str, buffer: torch.Tensor) -> Callable[[], float]:
    payload = memoryview(buffer.numpy())  # type: ignore[arg-type]
    names = itertools.cycle(f"{place}/overwritten-{number}" for number in range(_KEPT))
    for _, name in zip(range(_KEPT), names, strict=False):
        with open(name, "wb") as made:
            os.posix_fallocate(made.fileno(), 0, len(payload))

    def write() -> float:
        name = next(names)
        begin = time.perf_counter()
        fd = os.open(name, os.O_WRONLY | os.O_DIRECT)
        written = os.pwrite(fd, payload, 0)
        os.close(fd)
        took = time.perf_counter() - begin
        assert written == len(payload)
        return took

    return write
