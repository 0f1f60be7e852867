"""Traces of transfers and stalls for https://ui.perfetto.dev and chrome://tracing.

The format is the JSON object of the Trace Event Format: complete events ("X") for transfers and
stalls, counters ("C") for bandwidth and queues, metadata ("M") for names. Times are whole
microseconds of `time.perf_counter()`, which all processes of a Linux machine share, so that the
traces of several processes share one time line.

[Note: lanes]
Slices of one thread must nest. So each path and direction has as many lanes as it had concurrent
transfers, and a transfer goes into the first lane that is free at its start.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from offload_strategy.errors import OffloadError
from offload_strategy.telemetry.recorder import MoveRecord, StallRecord

_Event = dict[str, Any]


def write_trace(
    file: str | os.PathLike[str], moves: Iterable[MoveRecord], stalls: Iterable[StallRecord]
) -> None:
    """Write the records of one process as a trace, compressed if the name ends with ``.gz``.

    Raises OffloadError if the file cannot be written.
    """
    # Copies: the recorder continues while the trace is written.
    content = json_for_others(trace_object(list(moves), list(stalls))).encode()
    path = Path(file)
    try:
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    except OSError as error:
        raise OffloadError(
            f"the trace cannot be written to {str(path)!r}: {error.strerror}. Check the directory "
            f"and its permissions, or name another file."
        ) from error


def json_for_others(content: Any, **options: Any) -> str:
    """Return JSON for files that are shown to others: the user's home directory is "~" in it."""
    text, home = json.dumps(content, **options), os.path.expanduser("~").rstrip("/")
    inside = re.escape(json.dumps(home)[1:-1])
    return re.sub(rf"(?<![\w.~/-]){inside}(?![\w.-])", "~", text) if home else text


def trace_object(moves: Iterable[MoveRecord], stalls: Iterable[StallRecord]) -> dict[str, Any]:
    """Return the trace as an object for JSON; see `write_trace`."""
    counters: list[_Event] = []
    tracks: list[tuple[str, list[_Event]]] = []
    client = attrgetter("client")
    for name, waits in groupby(sorted(stalls, key=client), client):
        tracks.append((f"training waits: {name}", [_slice(stall) for stall in waits]))
    where = attrgetter("tier", "path", "direction")
    for (tier, path, direction), group in groupby(sorted(moves, key=where), where):
        records, place = list(group), tier if tier == path else f"{tier} {path}"
        tracks.append((f"{place} {direction}", [_slice(record) for record in records]))
        rates, queued = [], []
        for record in records:
            begin, end = _microseconds(record.started_at, record.finished_at)
            # Bytes per second over its duration; whole numbers, so that the sum of changes is 0.
            rates.append((begin, end, record.nbytes * 1_000_000 // (end - begin)))
            queued.append((math.floor(record.queued_at * 1e6), begin, record.nbytes))
        counters += _counter(f"{place} {direction} GB/s", rates, scale=1e-9)
        counters += _counter(f"{place} {direction} queued bytes", queued)

    names = [_name("process_name", 0, name="offload-strategy")]
    slices: list[_Event] = []
    lanes = ((label, *one) for label, track in tracks for one in enumerate(_lanes(track), start=1))
    for tid, (label, number, lane) in enumerate(lanes, start=1):
        shown = label if number == 1 else f"{label} ({number})"
        names.append(_name("thread_name", tid, name=shown))
        names.append(_name("thread_sort_index", tid, sort_index=tid))
        slices += [{"ph": "X", "tid": tid, **piece} for piece in lane]
    pid = os.getpid()
    events = names + sorted(slices + counters, key=lambda event: event["ts"])
    return {"traceEvents": [{"pid": pid, **event} for event in events], "displayTimeUnit": "ms"}


def _microseconds(begin: float, end: float) -> tuple[int, int]:
    """Return a span in whole microseconds, because viewers round and slices would overlap."""
    first = math.floor(begin * 1e6)
    return first, max(first + 1, math.floor(end * 1e6))


def _slice(record: MoveRecord | StallRecord) -> _Event:
    """Return what an event of a track says, but for the process and the lane."""
    begin, end = _microseconds(record.started_at, record.finished_at)
    where = {"ts": begin, "dur": end - begin}
    if isinstance(record, StallRecord):
        return {"name": record.client, "cat": "stall", **where, "args": {}}
    seconds = record.finished_at - record.started_at
    arguments: dict[str, Any] = {
        "client": record.client,
        "bytes": record.nbytes,
        "queued_ms": round((record.started_at - record.queued_at) * 1e3, 3),
    }
    if seconds >= 1e-9:  # of less no clock can tell, and the rate could be infinite
        arguments["GBps"] = round(record.nbytes / seconds / 1e9, 3)
    return {"name": record.client, "cat": str(record.direction), **where, "args": arguments}


def _lanes(track: list[_Event]) -> list[list[_Event]]:
    """Assign slices to as few lanes as possible, so that no two in a lane overlap."""
    lanes: list[list[_Event]] = []
    for piece in sorted(track, key=lambda piece: (piece["ts"], piece["dur"])):
        free = (one for one in lanes if one[-1]["ts"] + one[-1]["dur"] <= piece["ts"])
        if (lane := next(free, None)) is None:
            lanes.append(lane := [])
        lane.append(piece)
    return lanes


def _counter(name: str, spans: list[tuple[int, int, int]], scale: float = 1) -> list[_Event]:
    """Return each new value of a counter; a span (begin, end, value) counts while it lasts."""
    at = Counter[int]()
    for begin, end, value in spans:
        at[begin] += value
        at[end] -= value
    moments = sorted(moment for moment, change in at.items() if change)
    values = accumulate(at[moment] for moment in moments)
    return [
        {"ph": "C", "name": name, "ts": moment, "args": {"value": value * scale}}
        for moment, value in zip(moments, values, strict=True)
    ]


def _name(kind: str, tid: int, **arguments: Any) -> _Event:
    return {"ph": "M", "name": kind, "tid": tid, "args": arguments}
