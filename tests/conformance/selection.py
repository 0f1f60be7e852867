"""Which part of torch's databases a run tests: a twentieth that changes with every commit, or all.

`CONFORMANCE_PART=3/10` is the third of ten parts, and `1/1`, which `make conformance` sets, is all.
Without it there are twenty parts, and twenty commits in a row run all of them, each one once.
"""

import os
import subprocess
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")


@cache
def part() -> tuple[int, int]:
    """The part of this run, counted from 0, and the number of parts."""
    given = os.environ.get("CONFORMANCE_PART") or f"{commits() % 20 + 1}/20"
    number, parts = map(int, given.split("/"))
    assert 1 <= number <= parts, f"CONFORMANCE_PART={given} is not like 3/10"
    return number - 1, parts


def selected(cases: Iterable[Case], name: Callable[[Case], str] = str) -> list[Case]:
    """The cases of this run's part. A case stays in its part as long as its name is the same."""
    index, parts = part()
    return [case for case in cases if zlib.crc32(name(case).encode()) % parts == index]


def commits() -> int:
    """The number of commits up to this one; 0 where there is no repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True)
    except OSError:
        return 0
    return int(done.stdout or 0)
