"""A read that is needed now does not wait behind queued writes."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from benchmarks import disks
from benchmarks.io.results import Context, Result, median_ratio
from benchmarks.io.store_setup import CLIENT, OurStore
from benchmarks.io.tuned_peers import TICKET_BYTES, scratch
from offload_strategy.units import GiB, MiB

_THROTTLE = 300_000_000
_SMALL_BYTES = 2 * MiB


def urgent(context: Context) -> list[Result]:
    """The latency of `get` on an idle queue, and right behind 4 GiB of queued writes."""
    results = _on_path(context, "bare disk", scratch(context, "urgent"))
    why_not = disks.why_not()
    if why_not is not None:
        context.say(f"urgent on a throttled path is left out: {why_not}")
        return results
    nbytes = (1 if context.quick else 4) * GiB + 512 * MiB
    with disks.loop_disk(context.directory, nbytes) as disk, disks.throttle() as limits:
        limits.limit(disk, read=_THROTTLE, write=_THROTTLE)
        with limits.entered():
            results += _on_path(context, f"{_THROTTLE // 10**6} MB/s", disk.directory)
    return results


def _on_path(context: Context, where: str, directory: Path) -> list[Result]:
    queued = (512 * MiB) if context.quick else 4 * GiB
    results = []
    with OurStore([directory], write_behind=queued + TICKET_BYTES) as store:
        # What is queued shares the memory of these; only the path must take every byte.
        sources = store.buffers(4, TICKET_BYTES)
        for nbytes in (TICKET_BYTES, _SMALL_BYTES):
            (wanted,) = store.write([sources[0][:nbytes]])
            _get(store, wanted)  # the buffer that it is read into is there from now on
            idle, behind, left = [], [], []
            for number in range(context.repeats):
                context.say(f"urgent, {where}, {nbytes // MiB} MiB, {number + 1}")
                idle.append(_get(store, wanted))
                writes = [
                    store.store.put(sources[index % len(sources)], CLIENT, [store.tier])
                    for index in range(queued // TICKET_BYTES)
                ]
                behind.append(_get(store, wanted))
                stored = sum(ticket.state.value == "stored" for ticket in writes)
                left.append(1 - stored / len(writes))
                for ticket in reversed(writes):  # queued ones are given up, not waited for
                    store.store.free(ticket)
                store.store.wait_for_writes()
            store.store.free(wanted)
            judged = nbytes == TICKET_BYTES
            results.append(
                Result(
                    name=f"urgent: {nbytes // MiB} MiB read, {where}",
                    ours=1e3 * statistics.median(behind),
                    peer=1e3 * statistics.median(idle),
                    unit="ms",
                    ratio=median_ratio(behind, idle),
                    threshold=2.0,
                    at_least=False,
                    command="TensorStore.get on an idle queue",
                    details={
                        "queued_bytes": queued,
                        "behind_seconds": behind,
                        "idle_seconds": idle,
                        "share_of_writes_left_after_the_read": left,
                    },
                    judged=judged,
                )
            )
    return results


def _get(store: OurStore, ticket: object) -> float:
    begin = time.perf_counter()
    store.store.get(ticket)  # type: ignore[arg-type]
    took = time.perf_counter() - begin
    store.store.evict(ticket)  # type: ignore[arg-type]
    return took
