"""Which allocator a contender has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.allocators import Allocator

ROOT = Path(__file__).resolve().parents[2]
#: Frees and asks again for 16 MiB ten times; prints pages that the kernel had to give for it.
TEN_TIMES = """
import resource, sys
from benchmarks.allocators import Allocator
import torch
Allocator[sys.argv[1]].begin()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def once():
    torch.ones(4 << 20)
once()
before = faults()
for _ in range(10):
    once()
print(faults() - before)
"""


def _run(
    kind: Allocator, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TEN_TIMES, kind.name],
        env={**os.environ, **(kind.environment() if environment is None else environment)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(
    Allocator.best() is not Allocator.CACHES, reason="oneTBB's allocator is for x86-64 Linux"
)
class TestTheCachingOne:
    def test_freed_memory_is_at_hand(self) -> None:
        done = _run(Allocator.CACHES)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 5 * 4096  # pages of 4 KiB; without a cache 10 * 4096

    def test_left_out_by_the_loader_it_is_missed(self) -> None:
        done = _run(Allocator.CACHES, environment={"LD_PRELOAD": ""})
        assert done.returncode != 0
        assert "preloaded, but is not there" in done.stderr


def test_a_fixed_threshold_gives_all_back() -> None:
    done = _run(Allocator.GIVES_BACK)
    assert done.returncode == 0, done.stderr
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    a_page = (2 << 20) if huge.exists() and "[always]" in huge.read_text() else (4 << 10)
    assert int(done.stdout) >= 10 * ((16 << 20) // a_page)


def test_without_it_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.allocators._LIBRARIES", ("libno.so.2", "libnone.so.2"))
    assert Allocator.best() is Allocator.GIVES_BACK
    assert Allocator.best().environment() == {}
