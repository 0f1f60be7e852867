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


def _pages(kind: Allocator, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TEN_TIMES, kind.name]
    environment = {**os.environ, **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(
    Allocator.best() is not Allocator.CACHES, reason="oneTBB's allocator is for x86-64 Linux"
)
def test_the_caching_one_has_freed_memory_at_hand_and_is_missed_by_the_loader() -> None:
    done = _pages(Allocator.CACHES, Allocator.CACHES.environment())
    assert int(done.stdout) < 5 * 4096, done.stderr  # pages of 4 KiB; without a cache 10 * 4096
    done = _pages(Allocator.CACHES, {"LD_PRELOAD": ""})
    assert done.returncode != 0
    assert "preloaded, but is not there" in done.stderr


def test_without_it_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.allocators._LIBRARIES", ("libno.so.2", "libnone.so.2"))
    assert Allocator.best() is Allocator.GIVES_BACK
    assert Allocator.best().environment() == {}
    done = _pages(Allocator.GIVES_BACK, {})
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    a_page = (2 << 20) if huge.exists() and "[always]" in huge.read_text() else (4 << 10)
    assert int(done.stdout) >= 10 * ((16 << 20) // a_page), done.stderr
