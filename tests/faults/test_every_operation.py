"""A sample of `make faults`: operations of a training that fail, others with every commit."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.faults import every_operation, operations
from benchmarks.faults.points import SETTINGS, Point, points
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions import region
from offload_strategy.store.reader import Reader
from offload_strategy.store.ticket import Entry

_CONFIGURATIONS = 5
_POINTS_EACH = 8


@pytest.fixture(autouse=True)
def _operations() -> Iterator[None]:
    pytest.importorskip("xxhash")
    with operations.installed():
        yield


def _seed() -> str:
    """The commit, so that CI tries others each time; a fixed one where there is no git."""
    folder = Path(__file__).parent
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return "no commit"
    return done.stdout.strip()


def test_after_any_operation_has_failed_the_numbers_are_right_or_an_error_says_what_to_do() -> None:
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
    # The order of operations on threads varies: a few of the last may not be made again.
    assert reached >= _CONFIGURATIONS * _POINTS_EACH * 0.8


# ---------------------------------------------------------------------- what it must find
def _complaints(*points: str) -> str:
    seen = [every_operation.run(Point.parse(point)) for point in points]
    return "; ".join(complaint for each in seen for complaint in each.complaints)


def test_a_completion_that_swallows_errors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PathQueue,
        "_block_done",
        lambda queue, *args, done=PathQueue._block_done: done(queue, *args[:2], None),
    )
    found = _complaints(*(f"off-states-ssd:write.{number}:once" for number in (12, 14, 16)))
    assert "are wrong" in found or "is wrong" in found


def test_a_buffer_that_is_not_given_back_after_a_failed_read_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = []

    def ended(reader: Reader, entry: Entry, memory: torch.Tensor, move: Move) -> None:
        if move.error is not None:
            kept.append(memory)
        normal(reader, entry, memory, move)

    normal = Reader._ended
    monkeypatch.setattr(Reader, "_ended", ended)
    assert "mappings" in _complaints("off-activations-ssd:read.3:for-good")
    kept.clear()


def test_a_file_that_stays_open_after_a_failed_allocation_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = []

    def grow(fd: int, begin: int, end: int) -> None:
        spare = os.dup(fd)
        try:
            normal(fd, begin, end)
        except OSError:
            left.append(spare)
            raise
        os.close(spare)

    normal = region.grow
    monkeypatch.setattr(region, "grow", grow)
    assert "open file" in _complaints("off-activations-ssd:allocate.1:once")
    for fd in left:
        os.close(fd)
