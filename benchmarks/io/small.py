"""Small writes, one at a time, compared with a file per tensor, created and overwritten."""

from __future__ import annotations

import itertools
import mmap
import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch

from benchmarks.io.results import Context, Result, alternating, median_ratio, percentile
from benchmarks.io.store_setup import CLIENT, OurStore
from benchmarks.io.tuned_peers import scratch
from offload_strategy.store.ticket import Ticket
from offload_strategy.units import MiB

_NBYTES = 2 * MiB
_CREATED, _OVERWRITTEN = "a file created per tensor", "existing files overwritten"
_COMMANDS = {
    _CREATED: "fd = os.open(NEW, O_WRONLY|O_CREAT|O_EXCL|O_DIRECT); os.pwrite(fd, tensor, 0); "
    "os.close(fd)",
    _OVERWRITTEN: "fd = os.open(FILE, O_WRONLY|O_DIRECT); os.pwrite(fd, tensor, 0); os.close(fd)",
}
#: So many writes of a kind make a run; then the next kind follows.
_RUN = 25
#: Tickets, and files, that are there at a time: as many places are written in rotation.
_KEPT = 32
#: As many threads as the posix backend has by default.
_THREADS = 4
OURS = "ours"
_BY_THREADS = ", by 4 threads"
_FROM_OURS = ", from our buffer"


def small(context: Context) -> list[Result]:
    """Writing tensors of 2 MiB; kinds alternate in runs of `_RUN` writes.

    We write from a buffer of ours, which lies on huge pages where the machine has them for who asks
    (a request to the disk then has few segments); files are written from page-aligned memory of
    their own, as a program gets it that does not ask. The same files written from our buffer tell
    how much of the difference the buffer makes: for information.

    In a row: the time that each takes when many are written, until it is known that all are on the
    path. One at a time: the latency of each, waited for before the next begins.

    Where a file system puts a file is a matter of luck, and decides whether it takes one request or
    two: each alternation has files, and a space of ours, of its own.
    """
    runs = (100 if context.quick else 400) // _RUN
    latency: dict[str, list[float]] = defaultdict(list)
    in_a_row: dict[str, list[float]] = defaultdict(list)
    moved: list[float] = []
    for alternation in range(context.repeats):
        place = scratch(context, f"small-{alternation}")
        with OurStore([place]) as store, ThreadPoolExecutor(_THREADS) as threads:
            (buffer,) = store.buffers(1, _NBYTES)
            own = _page_aligned(buffer)
            given = memoryview(buffer.numpy())  # type: ignore[arg-type]
            one = {
                OURS: _ours(store, buffer),
                _CREATED: _created(f"{place}/own", own),
                _OVERWRITTEN: _overwritten(f"{place}/own", own),
                _CREATED + _FROM_OURS: _created(f"{place}/given", given),
                _OVERWRITTEN + _FROM_OURS: _overwritten(f"{place}/given", given),
            }
            many: dict[str, Callable[[], object]] = {
                OURS: partial(_ours_in_a_row, store, buffer),
                **{peer: partial(_repeat, write) for peer, write in one.items() if peer != OURS},
                _CREATED + _BY_THREADS: partial(_repeat, one[_CREATED], threads),
                _OVERWRITTEN + _BY_THREADS: partial(_repeat, one[_OVERWRITTEN], threads),
            }
            since = 0.0
            for run in range(-1, runs):  # the first writes every place once
                if run == 0:
                    since = time.perf_counter()
                for kind in alternating(list(one), run):
                    seconds = [one[kind]() for _ in range(_RUN)]
                    if run >= 0:
                        latency[kind] += seconds
            moved += [move.finished_at - move.queued_at for move in store.moves(since)]
            for run in range(-1, runs):
                for kind in alternating(list(many), run):
                    begin = time.perf_counter()
                    many[kind]()
                    if run >= 0:
                        in_a_row[kind].append((time.perf_counter() - begin) / _RUN)
            one.clear()
            many.clear()
        for file in place.iterdir():
            file.unlink()

    results = [
        _result(f"small: in a row, relative to {peer}", in_a_row, peer, threshold, judged=judged)
        for peer, threshold, judged in (
            (_CREATED, 2.0, True),
            (_OVERWRITTEN, 1.0, True),
            (_CREATED + _FROM_OURS, 2.0, False),
            (_OVERWRITTEN + _FROM_OURS, 1.0, False),
            (_CREATED + _BY_THREADS, 2.0, False),
            (_OVERWRITTEN + _BY_THREADS, 1.0, False),
        )
    ]
    # The latency of a single write is reported; what is asked for is the rate of writing tickets.
    for peer, threshold in (
        (_CREATED, 2.0),
        (_OVERWRITTEN, 1.0),
        (_CREATED + _FROM_OURS, 2.0),
        (_OVERWRITTEN + _FROM_OURS, 1.0),
    ):
        name = f"small: one at a time, median, relative to {peer}"
        results.append(_result(name, latency, peer, threshold, judged=False))
        ours, theirs = _p99(latency[OURS]), _p99(latency[peer])
        results.append(
            Result(
                name=f"small: one at a time, 99th percentile, relative to {peer}",
                ours=1e6 * ours,
                peer=1e6 * theirs,
                unit="µs",
                ratio=theirs / ours,
                threshold=threshold,
                details={"microseconds_of_the_move_alone": 1e6 * _p99(moved)},
                judged=False,
            )
        )
    return results


def _result(
    name: str, took: dict[str, list[float]], peer: str, threshold: float, *, judged: bool
) -> Result:
    return Result(
        name=name,
        ours=1e6 * statistics.median(took[OURS]),
        peer=1e6 * statistics.median(took[peer]),
        unit="µs",
        ratio=median_ratio(took[peer], took[OURS]),
        threshold=threshold,
        command=_COMMANDS[peer.removesuffix(_BY_THREADS).removesuffix(_FROM_OURS)],
        details={"samples": len(took[OURS])},
        judged=judged,
    )


def _p99(values: list[float]) -> float:
    return percentile(values, 99)


def _ours(store: OurStore, buffer: torch.Tensor) -> Callable[[], float]:
    kept: deque[Ticket] = deque()

    def write() -> float:
        begin = time.perf_counter()
        ticket = store.store.put(buffer, CLIENT, [store.tier])
        store.store.wait_for_writes()
        took = time.perf_counter() - begin
        kept.append(ticket)
        if len(kept) > _KEPT:
            store.store.free(kept.popleft())
        return took

    return write


def _ours_in_a_row(store: OurStore, buffer: torch.Tensor) -> None:
    tickets = [store.store.put(buffer, CLIENT, [store.tier]) for _ in range(_RUN)]
    store.store.wait_for_writes()
    for ticket in tickets:
        store.store.free(ticket)


def _repeat(write: Callable[[], float], threads: ThreadPoolExecutor | None = None) -> None:
    if threads is None:
        for _ in range(_RUN):
            write()
    else:
        wait([threads.submit(write) for _ in range(_RUN)])


def _page_aligned(buffer: torch.Tensor) -> memoryview:
    """A copy of `buffer` in memory as the machine gives it, where direct I/O can take it."""
    memory = memoryview(mmap.mmap(-1, buffer.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = memoryview(buffer.numpy())  # type: ignore[arg-type]
    return memory


def _created(place: str, payload: memoryview) -> Callable[[], float]:
    numbers = itertools.count()
    kept: deque[str] = deque()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT

    def write() -> float:
        name = f"{place}-created-{next(numbers)}"
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


def _overwritten(place: str, payload: memoryview) -> Callable[[], float]:
    names = itertools.cycle(f"{place}-overwritten-{number}" for number in range(_KEPT))
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
