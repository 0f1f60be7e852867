"""What a trace by PyTorch's profiler, in Chrome's format, says of a device.

Threads that train are those that call operators: threads of this package and of others that move
bytes are not traced for these.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Calls of a device's runtime, by what they mean for training.
REGISTRATION = re.compile(r"host(un)?register|hostalloc|mallochost|freehost", re.IGNORECASE)
WAIT = re.compile(r"synchronize|^cu(da)?Memcpy(2D|3D)?$|^hipMemcpy$", re.IGNORECASE)
ALLOCATION = re.compile(r"^(cuda|hip)(Malloc|Free)$|^cuMem(Alloc|Free)")

#: Microseconds.
Interval = tuple[float, float]


def read_trace(file: Path) -> dict[str, Any]:
    """Calls that matter, bytes and seconds of copies, and how much of these ran beside kernels.

    Calls are counted in the threads that train, but registrations and allocations in all.
    """
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    training = {event["tid"] for event in spans if event.get("cat") == "cpu_op"}
    calls = [e for e in spans if str(e.get("cat", "")).endswith(("_runtime", "_driver"))]
    kernels = merge(e for e in spans if e.get("cat") == "kernel")
    copies, hidden = {}, 0.0
    for way in ("DtoH", "HtoD"):
        mine = [e for e in spans if e.get("cat") == "gpu_memcpy" and way in e["name"]]
        busy = merge(mine)
        hidden += seconds(overlap(busy, kernels))
        nbytes = sum(int(e.get("args", {}).get("bytes", 0)) for e in mine)
        copies[way] = {"number": len(mine), "bytes": nbytes, "seconds": seconds(busy)}
    copying = sum(one["seconds"] for one in copies.values())
    return {
        "waits": _count(WAIT, (e for e in calls if e["tid"] in training)),
        "registrations": _count(REGISTRATION, calls),
        "allocations": _count(ALLOCATION, calls),
        "kernel_seconds": seconds(kernels),
        "copies": copies,
        "overlap": hidden / copying if copying else None,
    }


def _count(what: re.Pattern[str], calls: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    return dict(Counter(call["name"] for call in calls if what.search(call["name"])))


def merge(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """The times of events in microseconds, without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def seconds(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals) / 1e6


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Times in both; both are merged."""
    found, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        begin = max(one[left][0], other[right][0])
        end = min(one[left][1], other[right][1])
        if begin < end:
            found.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found
