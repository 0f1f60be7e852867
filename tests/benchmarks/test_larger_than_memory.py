"""How the largest model is found, and what is told of a process that did not end well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.parameters.job import Job
from benchmarks.parameters.largest import Bounds, Trained, doubling
from benchmarks.parameters.running import last_words, run


def _up_to(most: int, tried: list[int]) -> Callable[[int], Trained | str]:
    def attempt(layers: int) -> Trained | str:
        tried.append(layers)
        return Trained(100 * layers, layers, 1.0, 0) if layers <= most else "killed"

    return attempt


def test_the_layers_are_doubled_until_a_model_does_not_train() -> None:
    tried: list[int] = []
    found = doubling(_up_to(6, tried), Bounds(limit=0))
    assert tried == [1, 2, 4, 8]
    assert (found.parameters, found.why) == (400, "8 layers: killed")


def test_a_first_model_that_does_not_train_is_halved_until_one_does() -> None:
    tried: list[int] = []
    found = doubling(_up_to(3, tried), Bounds(limit=0, first=16))
    assert tried == [16, 8, 4, 2]
    assert (found.parameters, found.why) == (200, "4 layers: killed")


def test_none_may_train_and_all_may() -> None:
    none = doubling(_up_to(0, []), Bounds(limit=0, first=4))
    assert (none.best, none.why) == (None, "1 layer: killed")
    every = doubling(_up_to(99, []), Bounds(limit=0, most=5))
    assert (every.parameters, every.why) == (400, "no larger one was tried")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", ""),
        ("a warning\n", "a warning"),
        ("Traceback:\n  raise\nValueError: too large\n[W] goodbye\n", "ValueError: too large"),
        ("[rank0]: a.b.SomeError: no disk\n", "a.b.SomeError: no disk"),
        (
            "  assert x is not None\n    ^^^^^^\nAssertionError\n",
            "AssertionError: assert x is not None",
        ),
    ],
)
def test_the_last_words_of_an_output_are_its_error(output: str, words: str) -> None:
    assert last_words(output) == words


@pytest.mark.slow
def test_a_run_tells_why_it_failed_and_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    job = Job(64, 1, vocabulary=64, sequence=8, steps=1)
    failed = run(
        Job(64, 1, vocabulary=64, directory=str(tmp_path / "nowhere")), say=lambda line: None
    )
    assert failed.status == 1
    assert "there is no directory" in failed.complaint
    assert not failed.killed
    ended = run(job, say=lambda line: None)
    assert (ended.status, len(ended.of("step")), len(ended.of("end"))) == (0, 1, 1)
    endless = Job(64, 1, vocabulary=64, sequence=8, steps=10**9)
    late = run(endless, say=lambda line: None, seconds=0.5)
    assert late.overdue
    assert not late.killed
