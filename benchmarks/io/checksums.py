"""What checksums cost: large transfers, small ones, and steps of training."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Literal

from benchmarks.io.results import Context, Result, alternating, median_ratio
from benchmarks.io.store_setup import CLIENT, OurStore
from benchmarks.io.tuned_peers import scratch
from benchmarks.optimizer import session
from benchmarks.optimizer.contenders import Ours
from benchmarks.optimizer.tasks import SHAPES, TINY, RandomTokens
from offload_strategy.units import GiB, KiB, MiB

Mode = Literal["off", "sampled", "full"]
_MODES: tuple[Mode, ...] = ("off", "sampled", "full")
#: What the default may cost of a step, and of the time of a transfer.
_MOST = 1.02
_Seconds = dict[tuple[str, str], list[float]]


def checksums(context: Context) -> list[Result]:
    """The same with `io.checksum` off, sampled and full, in turn.

    Transfers are of 1 GiB: tickets of 64 MiB, and of 64 KiB, which share requests. Training has
    AdamW's states and activations on the disk, updates during backward (`eager`), and laps of two
    steps of which the second counts. Processor seconds are of the whole process: they tell what a
    step costs while others use the machine, too.
    """
    results = []
    for nbytes in (64 * MiB, 64 * KiB):
        seconds = _transfers(context, nbytes, (64 * MiB if context.quick else GiB) // nbytes)
        for way in ("write", "read", "write, processor", "read, processor"):
            results += _results(f"checksums: {nbytes // KiB} KiB, {way}", seconds, way)
    for model in ("tiny",) if context.quick else SHAPES:
        task = RandomTokens(SHAPES.get(model, TINY))
        contenders = {
            mode: Ours(overlap="eager", activations=True, budget="100%", checksum=mode).options()
            for mode in _MODES
        }
        rows = session.run(contenders, task, context, counted=1).rows
        for figure in ("seconds", "cpu_seconds"):
            laps = {(figure, mode): rows[mode].values(figure) for mode in _MODES}
            results += _results(f"checksums: {model}, step, {figure}", laps, figure)
        moved = rows["off"].median("read_bytes") + rows["off"].median("written_bytes")
        context.say(f"{model}: {moved / 1e9:.2f} GB a step; load {os.getloadavg()[0]:.1f}")
    return results


def _transfers(context: Context, nbytes: int, count: int) -> _Seconds:
    seconds: _Seconds = defaultdict(list)
    with ExitStack() as stack:
        stores = {
            mode: stack.enter_context(
                OurStore(
                    [scratch(context, f"checksum-{nbytes}-{mode}")],
                    budget=2 * count * nbytes,
                    capacity=2 * count * nbytes,
                    checksum=mode,
                )
            )
            for mode in _MODES
        }
        buffer = stores["off"].buffers(1, nbytes * count)[0]
        parts = buffer.split(nbytes)
        for repeat in range(-1, context.repeats):  # the first writes every place once
            for mode in alternating(list(_MODES), repeat):
                store, tier = stores[mode].store, stores[mode].tier
                begin, used = time.perf_counter(), time.process_time()
                options = ([tier], [None] * count, False)
                tickets = store.put_all(parts, CLIENT, *options)
                store.wait_for_writes()
                written, used_by_writes = time.perf_counter() - begin, time.process_time() - used
                for ticket in tickets:
                    store.evict(ticket)
                begin, used = time.perf_counter(), time.process_time()
                stores[mode].read(tickets, ahead=8)
                if repeat >= 0:
                    seconds["write", mode].append(written)
                    seconds["write, processor", mode].append(used_by_writes)
                    seconds["read", mode].append(time.perf_counter() - begin)
                    seconds["read, processor", mode].append(time.process_time() - used)
    return seconds


def _results(name: str, seconds: _Seconds, what: str) -> list[Result]:
    """A line for each mode; the default is judged by the clock."""
    off = seconds[what, "off"]
    return [
        Result(
            name=f"{name}: {mode}",
            ours=statistics.median(seconds[what, mode]),
            peer=statistics.median(off),
            unit="s",
            ratio=median_ratio(seconds[what, mode], off),
            threshold=_MOST,
            at_least=False,
            command="the same with io.checksum: off",
            details={"off_seconds": off, "seconds": seconds[what, mode]},
            judged=mode == "sampled" and "step, seconds" in name,
        )
        for mode in _MODES[1:]
    ]
