"""Traces of transfers and waits, as the Trace Event Format and Perfetto's importer ask for."""

import gzip
import json
import os
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offload_strategy.errors import OffloadError
from offload_strategy.telemetry.chrome_trace import trace_object, write_trace
from offload_strategy.telemetry.recorder import CLIENTS, Direction, MoveRecord, StallRecord

READ, WRITE = Direction.READ, Direction.WRITE


def move(started, finished, *, queued=None, direction=WRITE, nbytes=1_000_000):
    queued = started if queued is None else queued
    path = "/mnt/nvme0"
    return MoveRecord("activations", "ssd", path, direction, nbytes, queued, started, finished)


def tracks(trace):
    """The slices by the name of their lane, in the order in which lanes are shown."""
    meta = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in meta if e["name"] == "thread_sort_index"}
    return {
        names[tid]: [e for e in trace["traceEvents"] if e["ph"] == "X" and e["tid"] == tid]
        for tid in sorted(names, key=lambda tid: order[tid])
    }


def counter(trace, name):
    events = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    return [(event["ts"], event["args"]["value"]) for event in events if event["name"] == name]


def assert_valid(trace):
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    by_thread, last = defaultdict(list), -1
    for event in trace["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert event["pid"] == os.getpid()
        if event["ph"] == "M":
            assert last == -1, "names come first"
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= last, "sorted"
        last = event["ts"]
        if event["ph"] == "C":
            assert all(isinstance(v, int | float) and v >= 0 for v in event["args"].values())
        else:
            assert event["dur"] > 0
            by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        for (_, end), (begin, _) in pairwise(sorted(spans)):
            assert end <= begin, "two slices of one lane overlap"
    assert set(by_thread) <= {e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    json.dumps(trace, allow_nan=False)


clients = st.sampled_from(CLIENTS)
spans = st.tuples(st.floats(0, 1e7, allow_nan=False), st.floats(0, 2), st.floats(0, 2))
crowded_spans = st.tuples(st.floats(10, 11), st.floats(0, 0.5), st.floats(0, 0.5))
move_records = st.builds(
    lambda span, *what: MoveRecord(*what, span[0], span[0] + span[1], sum(span)),
    spans | crowded_spans,
    clients,
    st.just("ssd"),
    st.sampled_from(["/mnt/a", "/mnt/b", "ssd"]),
    st.sampled_from(Direction),
    st.integers(0, 2**40),
)
stall_records = st.builds(
    lambda span, client: StallRecord(client, span[0], span[0] + span[2]), spans, clients
)


@settings(max_examples=60, deadline=None)
@example([move(0.0, 5e-324, nbytes=1)], [])
@given(st.lists(move_records, max_size=30), st.lists(stall_records, max_size=10))
def test_any_records_make_a_valid_trace(moves, stalls):
    trace = trace_object(moves, stalls)
    assert_valid(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(moves) + len(stalls)
    assert sum(e["args"].get("bytes", 0) for e in slices) == sum(m.nbytes for m in moves)
    last = {e["name"]: e["args"]["value"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert set(last.values()) <= {0}, "all that began has ended"


def test_a_move_says_what_it_was():
    trace = trace_object([move(2.0, 2.004, queued=1.5, nbytes=8_000_000)], [])
    (piece,) = tracks(trace)["ssd /mnt/nvme0 write"]
    assert (piece["ts"], piece["dur"]) == (2_000_000, 4_000)
    assert (piece["name"], piece["cat"]) == ("activations", "write")
    figures = {"bytes": 8_000_000, "queued_ms": 500.0, "GBps": 2.0}
    assert piece["args"] == {"client": "activations", **figures}


def test_moves_at_the_same_time_lie_in_lanes_of_their_own_and_lanes_are_used_again():
    moves = [move(1, 4), move(2, 3), move(3, 5), move(4, 6), move(2, 6, direction=READ)]
    trace = trace_object(moves, [StallRecord("optimizer", 3, 3.5)])
    assert_valid(trace)
    seconds = {
        name: [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in slices]
        for name, slices in tracks(trace).items()
    }
    assert seconds == {
        "training waits: optimizer": [(3, 3.5)],
        "ssd /mnt/nvme0 read": [(2, 6)],
        "ssd /mnt/nvme0 write": [(1, 4), (4, 6)],
        "ssd /mnt/nvme0 write (2)": [(2, 3), (3, 5)],
    }
    assert next(iter(seconds)) == "training waits: optimizer"


def test_counters_have_the_bandwidth_of_what_moves_and_the_bytes_that_wait():
    moves = [move(1, 3, nbytes=4_000_000_000), move(2, 3, nbytes=1_000_000_000)]
    moves += [move(6, 7, queued=4, nbytes=10), move(7, 8, queued=5, nbytes=20)]
    trace = trace_object(moves, [])
    rates = counter(trace, "ssd /mnt/nvme0 write GB/s")
    assert rates[:3] == [(1_000_000, 2), (2_000_000, 3), (3_000_000, 0)]
    waiting = counter(trace, "ssd /mnt/nvme0 write queued bytes")
    assert waiting == [(4_000_000, 10), (5_000_000, 30), (6_000_000, 20), (7_000_000, 0)]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_holds_the_trace_or_is_named_if_it_cannot_be_written(name, tmp_path):
    file = tmp_path / name
    file.write_text("an older one")
    write_trace(file, iter([move(1, 2)]), iter([]))
    content = file.read_bytes()
    text = gzip.decompress(content) if name.endswith(".gz") else content
    assert json.loads(text) == trace_object([move(1, 2)], [])
    with pytest.raises(OffloadError, match=rf"nowhere/{name}.*No such file or directory"):
        write_trace(tmp_path / "nowhere" / name, [], [])
