"""Two paths of different speed as one tier, and what happens when one of them slows down."""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack

import torch

from benchmarks import disks
from benchmarks.io import fio
from benchmarks.io.results import Context, Result, Skipped
from benchmarks.io.store_setup import OurStore
from benchmarks.io.tuned_peers import DIRECTIONS, TICKET_BYTES
from offload_strategy.units import GiB, MiB

FAST, SLOW, CUT = 300_000_000, 150_000_000, 50_000_000
#: Steps after the cut; the last of them must have found the new shares.
_STEPS = 3
#: Loads under way at a time.
_AHEAD = 4
_FIO = fio.FioSettings("libaio", 4 * MiB, 8)


def two_paths(context: Context) -> list[Result]:
    """Bytes per second through `put` and `get`, over what the two throttles let through.

    A step writes its tickets, reads them back in order and frees them, as a training step does.
    """
    why_not = disks.why_not()
    if why_not is not None:
        raise Skipped(why_not)
    count = 8 if context.quick else 24
    steady: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    peer: dict[str, list[float]] = {direction: [] for direction in DIRECTIONS}
    after: list[list[dict[str, float]]] = []
    with ExitStack() as undo:
        room = count * TICKET_BYTES + 2 * GiB
        fast = undo.enter_context(disks.loop_disk(context.directory, room))
        slow = undo.enter_context(disks.loop_disk(context.directory, room))
        limits = undo.enter_context(disks.throttle())
        undo.enter_context(limits.entered())
        limits.limit(fast, read=FAST, write=FAST)
        limits.limit(slow, read=SLOW, write=SLOW)
        store = undo.enter_context(OurStore([fast.directory, slow.directory]))
        sources = store.buffers(count, TICKET_BYTES)
        step(store, sources)  # every place is written once before it is measured
        for number in range(context.repeats):
            context.say(f"two paths, round {number + 1} of {context.repeats}")
            limits.limit(slow, read=SLOW, write=SLOW)
            for _ in range(_STEPS):
                rates = step(store, sources)
            for direction, rate in rates.items():
                steady[direction].append(rate)
            for direction, rate in _both_with_fio(fast, slow, count * TICKET_BYTES // 3).items():
                peer[direction].append(rate)

            def cut() -> None:
                limits.limit(slow, read=CUT, write=CUT)

            # In the middle of a step: its writes take longer than this.
            timer = threading.Timer(0.3 * count * TICKET_BYTES / (FAST + SLOW), cut)
            timer.start()
            try:
                step(store, sources)
            finally:
                timer.join()
            after.append([step(store, sources) for _ in range(_STEPS)])

    both = FAST + SLOW
    results = []
    for direction in DIRECTIONS:
        results.append(
            Result(
                name=f"two paths: {direction}, {FAST // 10**6} + {SLOW // 10**6} MB/s",
                ours=statistics.median(steady[direction]) / 1e6,
                peer=both / 1e6,
                unit="MB/s",
                ratio=statistics.median(steady[direction]) / both,
                threshold=0.92,
                command=f"the sum of the throttles; fio on both at once: "
                f"{fio.shown(direction, count * TICKET_BYTES // 3, _FIO)}",
                details={
                    "ours": steady[direction],
                    "fio_on_both": peer[direction],
                    "bytes": count * TICKET_BYTES,
                },
            )
        )
    for direction in DIRECTIONS:
        by_step = [
            statistics.median(steps[number][direction] for steps in after)
            for number in range(_STEPS)
        ]
        results.append(
            Result(
                name=f"two paths: {direction}, {_STEPS} steps after the cut to {CUT // 10**6} MB/s",
                ours=by_step[-1] / 1e6,
                peer=(FAST + CUT) / 1e6,
                unit="MB/s",
                ratio=by_step[-1] / (FAST + CUT),
                threshold=0.9,
                command="the new sum of the throttles",
                details={
                    "median_by_step": by_step,
                    "rounds": [[steps[n][direction] for n in range(_STEPS)] for steps in after],
                },
            )
        )
    return results


def step(store: OurStore, sources: list[torch.Tensor]) -> dict[str, float]:
    """Write, read back, free; bytes per second of both directions."""
    nbytes = sum(source.numel() for source in sources)
    begin = time.perf_counter()
    tickets = store.write(sources)
    written = time.perf_counter()
    store.read(tickets, ahead=_AHEAD)
    read = time.perf_counter()
    return {"write": nbytes / (written - begin), "read": nbytes / (read - written)}


def _both_with_fio(fast: disks.LoopDisk, slow: disks.LoopDisk, nbytes: int) -> dict[str, float]:
    """What fio gets of both paths at once: twice as many bytes on the one that is twice as fast."""
    rates = {}
    for direction in DIRECTIONS:
        try:
            begin = time.perf_counter()
            runs = [
                fio.start(disk.directory / "fio", direction, share, _FIO)
                for disk, share in ((fast, 2 * nbytes), (slow, nbytes))
            ]
            for run in runs:
                fio.finish(run, direction)
        except Skipped:
            return {}
        # From the start of the processes, not by fio's own clocks, which do not begin together.
        rates[direction] = 3 * nbytes / (time.perf_counter() - begin)
    return rates
