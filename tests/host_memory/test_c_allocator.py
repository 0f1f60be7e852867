"""What glibc keeps of freed memory, and processes whose freed tensors leave no gaps in its heap."""

import os
import platform

import pytest

from offload_strategy.host_memory import c_allocator
from offload_strategy.host_memory.c_allocator import leaves_gaps
from tests.support import run_python

LIBRARY, VERSION = platform.libc_ver()
pytestmark = pytest.mark.skipif(LIBRARY != "glibc", reason="the C library is not glibc")

_NO_GAPS = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
#: Page faults of 128 MiB of memory that is freed and acquired again, as torch does for tensors,
#: before freed memory is kept and after. Then MiB of it that glibc has: at once, after they were
#: returned, and after another time.
_PROGRAM = """
import ctypes, resource
from offload_strategy.host_memory.c_allocator import freed_memory, keep_freed_memory
library = ctypes.CDLL(None)
def make():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [ctypes.c_void_p() for _ in range(32)]
    for tensor in tensors:
        library.posix_memalign(ctypes.byref(tensor), ctypes.c_size_t(64), ctypes.c_size_t(4 << 20))
        ctypes.memset(tensor, 1, 4 << 20)
    for tensor in tensors:
        library.free(tensor)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
make()
returned = make()
keep_freed_memory()
make()
print(returned, make(), freed_memory.nbytes() >> 20)
freed_memory.return_all()
print(freed_memory.nbytes() >> 20)
make()
print(freed_memory.nbytes() >> 20)
"""


def _printed(program, *words, **variables):
    """What a program prints, by words, in a process with these settings of the allocator only."""
    environment = {n: v for n, v in os.environ.items() if "MALLOC" not in n and "GLIBC" not in n}
    return run_python("-c", program, *words, env={**environment, **variables}).split()


def _run(**variables):
    return [int(number) for number in _printed(_PROGRAM, **variables)]


def test_memory_that_was_freed_is_there_again_without_page_faults():
    returned, kept, *freed = _run()
    assert 2 * kept < returned, "of 32,768 pages"
    assert freed == [0] * 3 or not leaves_gaps(), "gaps do not count"


@pytest.mark.skipif([*map(int, VERSION.split("."))] < [2, 33], reason="this glibc does not tell")
def test_freed_memory_is_known_unless_it_was_returned():
    _, _, first, returned, again = _run(GLIBC_TUNABLES=_NO_GAPS)
    assert first >= 120
    assert returned < 4
    assert again >= 120


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"])
def test_settings_of_the_environment_stay_as_they_are(variable):
    _, kept, *_ = _run(**{variable: "131072"})
    assert kept > 16_000


def test_whether_freed_tensors_leave_gaps_depends_on_the_version_and_the_tunables(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(c_allocator._Caches, "are_off", False)
    found = {}
    for version in ("glibc 2.35", "glibc 2.41", "musl 1.2", ""):
        monkeypatch.setattr("os.confstr", lambda _, version=version: version)
        found[version] = leaves_gaps()
    assert found == {"glibc 2.35": True, "glibc 2.41": False, "musl 1.2": False, "": False}
    monkeypatch.setattr("os.confstr", lambda _: "glibc 2.35")
    monkeypatch.setenv("GLIBC_TUNABLES", _NO_GAPS)
    assert not leaves_gaps()


#: Whether freed tensors leave gaps before and after caches are turned off, and bytes of eight small
#: blocks that are free as soon as they are freed; blocks in caches count as in use.
_CACHES = """
import ctypes
from offload_strategy.host_memory import c_allocator
library, usage = ctypes.CDLL(None), c_allocator.freed_memory._usage
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if {changed}:
    c_allocator._CACHE_VALUES = (64, 1032, 8, 0)
before = c_allocator.leaves_gaps()
c_allocator.reuse_freed_memory()
def freed():
    blocks = [library.malloc(ctypes.c_size_t(600)) for _ in range(8)]
    used = usage().uordblks
    for block in blocks:
        library.free(block)
    return used - usage().uordblks
freed()
print(int(before), int(c_allocator.leaves_gaps()), freed())
"""
_HAS_CACHES = [2, 33] <= [*map(int, (VERSION or "0").split("."))] < [2, 39]


@pytest.mark.skipif(not _HAS_CACHES, reason="this glibc has no caches that leave gaps")
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("tunables", ["", "glibc.malloc.tcache_count=7", "glibc.malloc.mxfast=64"])
def test_caches_of_a_running_process_are_turned_off_where_they_are_as_expected(tunables, changed):
    printed = _printed(_CACHES.format(changed=changed), GLIBC_TUNABLES=tunables)
    before, after, freed = (int(number) for number in printed)
    assert before
    assert bool(after) == bool(tunables or changed), "the user's own settings come first"
    assert (freed > 7 * 600) == (not after)


#: What leaves in an engine of each config, and whether freed tensors leave gaps then.
_ENGINES = """
import os, sys, torch
from offload_strategy import OffloadEngine
from offload_strategy.host_memory.c_allocator import leaves_gaps
model = torch.nn.Linear(8, 8)
on, off = {"enabled": True}, {"enabled": False}
for sections in ({"optimizer": on, "activations": off}, {"optimizer": off, "activations": on}, {}):
    if os.fork() == 0:
        tiers = [{"name": "disk", "kind": "ssd", "path": sys.argv[1]}]
        with OffloadEngine({**sections, "tiers": tiers}) as engine:
            engine.attach(model, torch.optim.AdamW(model.parameters()))
            print(leaves_gaps(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(not _HAS_CACHES, reason="this glibc has no caches that leave gaps")
def test_where_anything_leaves_freed_tensors_leave_no_gaps(tmp_path):
    assert _printed(_ENGINES, tmp_path) == ["False", "False", "True"]


#: Blocks lie in a cache, and one that is in use has by chance what glibc marks them with, such as
#: what was left there by a thread that has ended: glibc looks for it in the cache when it is freed.
_MARKED = """
import ctypes
from offload_strategy.host_memory import c_allocator
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [library.malloc(ctypes.c_size_t(1000)) for _ in range(9)]
for block in blocks[:5]:
    library.free(block)
mark = ctypes.c_uint64.from_address(blocks[0] + 8).value
for block in blocks[5:]:
    ctypes.c_uint64.from_address(block + 8).value = mark
c_allocator.reuse_freed_memory()
for block in blocks[5:]:
    library.free(block)
print(c_allocator.leaves_gaps())
"""


@pytest.mark.skipif(not _HAS_CACHES, reason="this glibc has no caches that leave gaps")
def test_blocks_that_are_in_caches_when_these_are_turned_off_do_no_harm():
    assert _printed(_MARKED) == ["False"]
