"""What glibc keeps of freed memory, and processes whose freed tensors leave no gaps in its heap."""

import json
import os
import subprocess
import sys

import pytest

from offload_strategy.host_memory.c_allocator import leaves_gaps

pytestmark = pytest.mark.skipif(
    not (getattr(os, "confstr_names", None) and (os.confstr("CS_GNU_LIBC_VERSION") or "")),
    reason="the C library is not glibc",
)


def _before(version: tuple[int, ...]) -> bool:
    return tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) < version


#: Page faults of 128 MiB of tensors that are freed and made again, after a first time.
_AGAIN = """
import json, resource, sys, torch
from offload_strategy.host_memory.c_allocator import keep_freed_memory
if json.loads(sys.argv[1]):
    keep_freed_memory()
def make():
    return [torch.ones(1 << 20) for _ in range(32)]
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(program: str, *arguments: str, **variables: str) -> int:
    environment = {n: v for n, v in os.environ.items() if "MALLOC" not in n and "GLIBC" not in n}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_there_again_without_page_faults() -> None:
    returned, kept = (_run(_AGAIN, json.dumps(keeps)) for keeps in (False, True))
    assert 2 * kept < returned, "of 32,768 pages"


#: MiB that glibc has of freed tensors: of 64, after they were returned, and used and freed again.
_FREED = """
import torch
from offload_strategy.host_memory.c_allocator import freed_memory, keep_freed_memory
keep_freed_memory()
def make():
    return [torch.ones(1 << 20) for _ in range(16)]
make(); first = freed_memory.nbytes()
freed_memory.return_all(); returned = freed_memory.nbytes()
made = make(); freed_memory.nbytes(); del made
print(int(first >> 20 >= 60 and returned >> 20 < 4 and freed_memory.nbytes() >> 20 >= 60))
"""


@pytest.mark.skipif(_before((2, 33)), reason="this glibc does not tell")
def test_freed_memory_is_known_unless_it_was_returned() -> None:
    tunables = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
    assert _run(_FREED, GLIBC_TUNABLES=tunables) == 1
    if _before((2, 39)):
        assert _run(_FREED) == 0, "gaps do not count"


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_settings_of_the_environment_stay_as_they_are(variable: str) -> None:
    assert _run(_AGAIN, "true", **{variable: "131072"}) > 16_000


def test_whether_freed_tensors_leave_gaps_depends_on_the_version_and_the_tunables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    found = {}
    for version in ("glibc 2.35", "glibc 2.41", "musl 1.2", ""):
        monkeypatch.setattr("os.confstr", lambda _, version=version: version)
        found[version] = leaves_gaps()
    assert found == {"glibc 2.35": True, "glibc 2.41": False, "musl 1.2": False, "": False}
    monkeypatch.setattr("os.confstr", lambda _: "glibc 2.35")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0")
    assert not leaves_gaps()
