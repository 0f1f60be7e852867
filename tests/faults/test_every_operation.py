"""A sample of `make faults`: operations of a training that fail, others with every commit."""

import os
import random
import subprocess
from pathlib import Path

import pytest

from benchmarks.faults import every_operation, operations
from benchmarks.faults.points import SETTINGS, Point, points
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions import region
from offload_strategy.store.reader import Reader

_CONFIGURATIONS = 5
_POINTS_EACH = 7
_FOUND = [
    "off-states-ssd:write.16:once",  # `state_dict()` had unwritten rows; no note on the error
    "off-all-ssd:write.64:once",  # a complete `step()` raised
    "off-activations-ssd:status.14:once",  # an OSError when the file grows
    "off-activations-ssd:status.8:for-good",  # an OSError at the start, an open descriptor
    "off-activations-ssd:announce.2:once",  # a queue that never went on
    "off-activations-ssd:close.7:once",  # an OSError of `close()`
    "off-activations-ssd:unlink.2:once",  # an open descriptor after a save
    "off-states-ssd:map-memory.3:once",  # an OSError for want of memory
]
"""Points that have found a bug."""


@pytest.fixture(autouse=True)
def _operations():
    pytest.importorskip("xxhash")
    with operations.installed():
        yield


def _seed():
    """The commit, so that CI tries others each time; a fixed one where there is no git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no commit"


def test_after_any_operation_has_failed_the_numbers_are_right_or_an_error_says_what_to_do():
    seed = _seed()
    print(f"the sample of {seed}")
    chosen = random.Random(seed)
    settings = chosen.sample([each for each in SETTINGS if each.ranks == 1], _CONFIGURATIONS)
    found, reached = [], 0
    for setting in settings:
        those = list(points(setting, every_operation.counted(setting)))
        for point in chosen.sample(those, _POINTS_EACH):
            seen = every_operation.run(point)
            reached += bool(seen.failed)
            found += [f"{point}: {complaint}" for complaint in seen.complaints]
    assert found == []
    # What is still in memory is not read: the last operations are not always made again.
    assert reached >= _CONFIGURATIONS * _POINTS_EACH / 2


@pytest.mark.parametrize("point", _FOUND)
def test_what_a_point_has_found_stays_repaired(point):
    assert every_operation.run(Point.parse(point)).complaints == []


# ---------------------------------------------------------------------- what it must find
def _complaints(operation, numbers=(1,)):
    """Of the first operation of these, which threads do not make in the same order each time."""
    runs = (every_operation.run(Point.parse(f"{operation}.{n}:once")) for n in numbers)
    return "; ".join(next((seen.complaints for seen in runs if seen.complaints), []))


def test_a_completion_that_swallows_errors_is_found(monkeypatch):
    normal = PathQueue._block_done
    monkeypatch.setattr(PathQueue, "_block_done", lambda *args: normal(*args[:3], None))
    assert "wrong" in _complaints("off-states-ssd:write", range(8, 24, 2))


def test_a_buffer_that_is_not_given_back_after_a_failed_read_is_found(monkeypatch):
    kept, normal = [], Reader._ended

    def ended(reader, entry, memory, move):
        if move.error is not None:
            kept.append(memory)
        normal(reader, entry, memory, move)

    monkeypatch.setattr(Reader, "_ended", ended)
    assert "mappings" in _complaints("off-states-ssd:read", range(4, 40, 4))
    kept.clear()


def test_a_file_that_stays_open_after_a_failed_allocation_is_found(monkeypatch):
    left, normal = [], region.grow

    def grow(fd, begin, end):
        spare = os.dup(fd)
        try:
            normal(fd, begin, end)
        except OSError:
            left.append(spare)
            raise
        os.close(spare)

    monkeypatch.setattr(region, "grow", grow)
    assert "open file" in _complaints("off-activations-ssd:allocate")
    for fd in left:
        os.close(fd)
