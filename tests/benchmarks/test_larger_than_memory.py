"""How the largest model is found, and what is told of a process that did not end well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.parameters.job import Job
from benchmarks.parameters.largest import Bounds, Trained, doubling
from benchmarks.parameters.running import last_words, run


@pytest.mark.parametrize(
    ("most", "bounds", "tried", "parameters", "why"),
    [
        # Layers are doubled until a model does not train, or halved until the first one does.
        (6, {}, [1, 2, 4, 8], 400, "8 layers: killed"),
        (3, {"first": 16}, [16, 8, 4, 2], 200, "4 layers: killed"),
        (0, {"first": 4}, [4, 2, 1], None, "1 layer: killed"),
        (99, {"most": 5}, [1, 2, 4], 400, "no larger one was tried"),
    ],
)
def test_the_largest_model_that_trains_is_found(
    most: int, bounds: dict[str, int], tried: list[int], parameters: int | None, why: str
) -> None:
    seen = []

    def attempt(layers: int) -> Trained | str:
        seen.append(layers)
        return Trained(100 * layers, layers, 1.0, 0) if layers <= most else "killed"

    found = doubling(attempt, Bounds(limit=0, **bounds))
    assert (seen, found.why) == (tried, why)
    assert (found.parameters if found.best else None) == parameters


@pytest.mark.parametrize(
    ("output", "words"),
    [
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
    def quiet(line: str) -> None: ...

    job = Job(64, 1, vocabulary=64, sequence=8, steps=10**9)
    failed = run(replace(job, directory=str(tmp_path / "nowhere")), say=quiet)
    assert failed.status == 1
    assert "there is no directory" in failed.complaint
    assert not failed.killed
    ended = run(replace(job, steps=1), say=quiet)
    assert (ended.status, len(ended.of("step")), len(ended.of("end"))) == (0, 1, 1)
    late = run(job, say=quiet, seconds=0.5)
    assert late.overdue
    assert not late.killed
